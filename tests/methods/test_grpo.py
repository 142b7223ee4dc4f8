"""GRPO's weight and surrogate by hand and against their definitions.

Covers equality at the bounds, the dual clip, the clamp, per-token bounds and gradcheck of the surrogate with the bounds
of ACPO and BAPO held fixed. Does not cover how those bounds are found.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.check.contract import evaluate
from verl_clipx.methods import Bounds
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.grpo import Grpo

from .at import row, weight_and_value


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "loss"),
    [
        (0.5, 2.0, 0.5, -1.0),
        (0.5, -2.0, 0.0, 1.6),
        (0.8, -1.0, 0.8, 0.8),
        (1.0, -1.0, 1.0, 1.0),
        (1.25, 1.0, 1.25, -1.25),
        (1.5, 2.0, 0.0, -2.5),
        (1.5, -2.0, 1.5, 3.0),
        (3.0, -1.0, 3.0, 3.0),
        (3.5, -2.0, 0.0, 6.0),
        (3.5, 2.0, 0.0, -2.5),
        (3.5, 0.0, 3.5, 0.0),
    ],
)
def test_weight_and_value_by_hand(ratio, advantage, expected, loss):
    method = Grpo(clip_low=0.8, clip_high=1.25, dual_clip=3.0)
    found, value = weight_and_value(method, row(ratio), row(advantage))
    assert found.item() == expected
    assert value.item() == pytest.approx(loss, rel=1e-15)


def test_without_a_dual_clip_negative_tokens_are_unbounded_above():
    found, value = weight_and_value(Grpo(dual_clip=None), row(100.0), row(-1.0))
    assert found.item() == value.item() == 100.0


def test_beyond_the_clamp_there_is_value_but_no_gradient():
    ratio, advantages = row(math.exp(25), math.exp(-25)), row(-1.0, 1.0)
    found, value = weight_and_value(Grpo(dual_clip=None), ratio, advantages)
    assert found.tolist() == [[0.0, 0.0]]
    assert_close(value, row(math.exp(20), -math.exp(-20)))


def test_mixed_float_and_tensor_bounds():
    found, value = weight_and_value(Grpo(), row(1.3, 1.3), row(1.0, 1.0), Bounds(0.8, row(1.1, 1.5)))
    assert found.tolist() == [[0.0, 1.3]]
    assert value.tolist() == [[-1.1, -1.3]]


# ACPO's epsilon can exceed 1.
@pytest.mark.parametrize("low", [0.0, -2.0])
def test_lower_bound_of_zero_or_less_never_clips(low):
    method = Grpo(dual_clip=None, log_ratio_clamp=None)
    found, value = weight_and_value(method, row(1e-9, 1e9), row(-1.0, 1.0), Bounds(low, math.inf))
    assert found.tolist() == [[1e-9, 1e9]]
    assert value.tolist() == [[1e-9, -1e9]]


def loss_and_gradient(method, log_prob, advantages):
    result = evaluate(
        method,
        log_prob=log_prob,
        old_log_prob=torch.zeros_like(log_prob),
        advantages=advantages,
        mask=torch.ones_like(log_prob, dtype=torch.bool),
    )
    return result.loss, torch.autograd.grad(result.loss.sum(), log_prob)[0]


@given(
    log_ratio=st.floats(-30, 30),
    advantage=st.floats(-5, 5),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 4.0),
    dual_clip=st.none() | st.floats(1.5, 10),
)
@settings(deadline=None)
def test_value_and_gradient_agree_with_autograd_through_the_textbook_formula(
    log_ratio, advantage, low, high, dual_clip
):
    kinks = [math.log(low), math.log(high), 20.0, -20.0] + ([] if dual_clip is None else [math.log(dual_clip)])
    if any(abs(log_ratio - kink) < 1e-6 for kink in kinks):
        log_ratio += 1e-3
    log_prob, advantages = row(log_ratio).requires_grad_(), row(advantage)
    ratio = log_prob.clamp(-20.0, 20.0).exp()
    value = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None and advantage < 0:
        value = torch.minimum(value, -advantages * dual_clip)
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    found = loss_and_gradient(Grpo(clip_low=low, clip_high=high, dual_clip=dual_clip), log_prob, advantages)
    assert_close(found, (value, gradient))


@pytest.mark.parametrize(
    "method", [Grpo(clip_high=1.28, dual_clip=2.0), Acpo(alpha=0.5, dual_clip=2.0), Bapo(target=0.5, dual_clip=2.0)]
)
def test_gradcheck_of_the_surrogate_with_bounds_held_fixed(method):
    generator = torch.Generator().manual_seed(0)
    log_prob, advantages = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    old_log_prob = -torch.rand(5, 8, dtype=torch.float64, generator=generator)
    inputs = {"old_log_prob": old_log_prob, "advantages": advantages, "mask": torch.ones_like(advantages) > 0}
    log_prob = (old_log_prob + log_prob).requires_grad_()
    held = evaluate(method, log_prob=log_prob, **inputs)
    kinks = torch.stack([torch.as_tensor(bound).expand(5, 8) for bound in (*held.bounds, 2.0)])
    assert ((held.tokens.ratio - kinks).abs() > 1e-4).all(), "a kink too close for finite differences: another seed"
    assert 0 < (held.weight == 0).sum() < held.weight.numel()
    loss = lambda log_prob: evaluate(method, log_prob=log_prob, statistics=held.statistics, **inputs).loss  # noqa: E731
    assert torch.autograd.gradcheck(loss, (log_prob,))
