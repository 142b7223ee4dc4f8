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

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.grpo import gradient_weight, loss_value
from verl_clipx.losses.policy_gradient import per_token_loss
from verl_clipx.losses.ratio import importance_ratio

BOUNDS = Bounds(0.8, 1.25)


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.5, 1.0, 0.5),
        (0.5, -1.0, 0.0),
        (0.8, -1.0, 0.8),
        (1.0, -1.0, 1.0),
        (1.25, 1.0, 1.25),
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 1.5),
        (3.0, -1.0, 3.0),
        (3.5, -1.0, 0.0),
        (3.5, 0.0, 3.5),
    ],
)
def test_weight_by_hand(ratio, advantage, expected):
    weight = gradient_weight(_rows(ratio), _rows(advantage), BOUNDS, dual_clip=3.0)
    assert weight.item() == expected


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),
        (1.5, 2.0, -2.5),
        (1.5, -2.0, 3.0),
        (3.5, -2.0, 6.0),
        (3.5, 2.0, -2.5),
        (3.5, 0.0, 0.0),
    ],
)
def test_value_by_hand(ratio, advantage, expected):
    value = loss_value(_rows(ratio), _rows(advantage), BOUNDS, dual_clip=3.0)
    assert value.item() == pytest.approx(expected, rel=1e-15)


def test_without_a_dual_clip_negative_tokens_are_unbounded_above():
    assert gradient_weight(_rows(100.0), _rows(-1.0), BOUNDS).item() == 100.0
    assert loss_value(_rows(100.0), _rows(-1.0), BOUNDS).item() == 100.0


def test_beyond_the_clamp_there_is_value_but_no_gradient():
    ratio, advantages = _rows(math.exp(25), math.exp(-25)), _rows(-1.0, 1.0)
    assert gradient_weight(ratio, advantages, BOUNDS, log_ratio_clamp=20.0).tolist() == [[0.0, 0.0]]
    expected = _rows(math.exp(20), -math.exp(-20))
    assert_close(loss_value(ratio, advantages, BOUNDS, log_ratio_clamp=20.0), expected)


def test_mixed_float_and_tensor_bounds():
    bounds = Bounds(0.8, torch.tensor([[1.1, 1.5]], dtype=torch.float64))
    ratio, advantages = _rows(1.3, 1.3), _rows(1.0, 1.0)
    assert gradient_weight(ratio, advantages, bounds).tolist() == [[0.0, 1.3]]
    assert loss_value(ratio, advantages, bounds).tolist() == [[-1.1, -1.3]]


def test_lower_bound_of_zero_or_less_never_clips():
    # ACPO's epsilon can exceed 1.
    for low in (0.0, -2.0):
        bounds = Bounds(low, torch.inf)
        assert gradient_weight(_rows(1e-9, 1e9), _rows(-1.0, 1.0), bounds).tolist() == [[1e-9, 1e9]]
        assert loss_value(_rows(1e-9, 1e9), _rows(-1.0, 1.0), bounds).tolist() == [[1e-9, -1e9]]


@given(
    log_ratio=st.floats(-30, 30),
    advantage=st.floats(-5, 5),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 4.0),
    dual_clip=st.none() | st.floats(1.5, 10),
)
@settings(deadline=None)
def test_value_and_weight_agree_with_autograd_through_the_textbook_formula(log_ratio, advantage, low, high, dual_clip):
    kinks = [math.log(low), math.log(high), 20.0, -20.0] + ([] if dual_clip is None else [math.log(dual_clip)])
    if any(abs(log_ratio - kink) < 1e-6 for kink in kinks):
        log_ratio += 1e-3
    log_prob = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    advantages = _rows(advantage)
    ratio = log_prob.clamp(-20.0, 20.0).exp()
    value = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None and advantage < 0:
        value = torch.minimum(value, -advantages * dual_clip)
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)

    _, saturated = importance_ratio(log_prob, torch.zeros_like(log_prob), None)
    options = {"dual_clip": dual_clip, "log_ratio_clamp": 20.0}
    assert_close(loss_value(saturated, advantages, Bounds(low, high), **options), value.detach())
    if advantage != 0:
        weight = gradient_weight(saturated, advantages, Bounds(low, high), **options)
        assert_close(-weight * advantages, gradient)


@pytest.mark.parametrize("bounds", ["fixed", "per token", "searched"])
def test_gradcheck_of_the_surrogate_with_bounds_held_fixed(bounds):
    generator = torch.Generator().manual_seed(0)
    log_prob = 0.5 * torch.randn(3, 5, dtype=torch.float64, generator=generator)
    advantages = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    held = {
        "fixed": Bounds(0.8, 1.28),
        "per token": Bounds(
            *(1 + sign * torch.rand(3, 5, dtype=torch.float64, generator=generator) for sign in (-1, 1))
        ),
        "searched": Bounds(torch.tensor(0.6, dtype=torch.float64), torch.tensor(1.45, dtype=torch.float64)),
    }[bounds]
    kinks = torch.stack([torch.as_tensor(bound).expand(3, 5).log() for bound in (*held, 2.0)])
    assert ((log_prob - kinks).abs() > 1e-4).all(), "a kink too close for finite differences: choose another seed"

    def loss(log_prob):
        _, ratio = importance_ratio(log_prob, torch.zeros_like(log_prob), None)
        options = {"dual_clip": 2.0, "log_ratio_clamp": 20.0}
        weight = gradient_weight(ratio, advantages, held, **options)
        return per_token_loss(log_prob, loss_value(ratio, advantages, held, **options), weight * advantages)

    clipped = gradient_weight(log_prob.exp(), advantages, held, dual_clip=2.0) == 0
    assert clipped.any()
    assert not clipped.all()
    assert torch.autograd.gradcheck(loss, (log_prob.requires_grad_(),))
