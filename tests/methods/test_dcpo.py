"""DCPO's bounds and weights by hand, against the inequality that they solve, and against autograd.

Does not cover the contract and micro-batches (test_properties.py), nor the paper's advantages and its average over
tokens, which are not the plugin's.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.check.contract import example
from verl_clipx.methods.dcpo import Dcpo

from .at import row, tokens_at


def bounds_at(method, *probability, dtype=torch.float64):
    q = row(*probability, dtype=dtype)
    t = tokens_at(torch.ones_like(q), torch.ones_like(q), old_log_prob=q.log())
    return method.bounds(t, method.decide(method.statistics(t)))


def test_bounds_by_hand():
    # The paper's numbers are those at which a likely token has GRPO's bounds: 0.8 at q = 1 and 1.2 at q = 1 / 1.2.
    low, high = bounds_at(Dcpo(), 1.0, 1 / 1.2, 0.64, 0.01, 1e-4)
    # 4 * 0.16 / q is 0.64, 0.768, 1, 64, 6400; 4 * 0.2 / q is 0.8, 0.96, 1.25, 80, 8000.
    assert_close(low, row(0.8, 0.5 + 0.5 * math.sqrt(0.232), 0.5, 0.5, 0.5))
    assert_close(high, row(0.5 + 0.5 * math.sqrt(1.8), 1.2, 1.25, 5.0, 10.0))


def test_the_largest_ratio_bounds_the_upper_bound():
    assert bounds_at(Dcpo(largest_ratio=3.0), 0.01).high.tolist() == [[3.0]]
    assert_close(bounds_at(Dcpo(largest_ratio=None), 1e-4).high, row(0.5 + 0.5 * math.sqrt(8001)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_a_probability_of_zero_has_bounds(dtype, epsilon):
    low, high = bounds_at(Dcpo(epsilon_low=epsilon, epsilon_high=epsilon), 0.0, dtype=dtype)
    assert (low.item(), high.item()) == ((0.5, 10.0) if epsilon else (1.0, 1.0))


@given(q=st.floats(1e-3, 1.0), epsilon=st.floats(1e-3, 0.5))
@settings(deadline=None)
def test_at_the_bounds_the_change_times_the_new_probability_is_epsilon(q, epsilon):
    low, high = (
        bound.item() for bound in bounds_at(Dcpo(epsilon_low=epsilon, epsilon_high=epsilon, largest_ratio=None), q)
    )
    assert (high - 1) * high * q == pytest.approx(epsilon, rel=1e-9)
    # Where no ratio changes that much, the one that changes the most.
    assert (1 - low) * low * q == pytest.approx(min(epsilon, q / 4), rel=1e-9, abs=1e-12)
    assert 0.5 <= low <= 1 <= high


def test_weights_by_hand():
    # Bounds 0.5 and 1.25 for all.
    ratio = row(0.49, 0.51, 1.24, 1.26, 0.4, 1.3, 9.0, 11.0, 11.0)
    advantages = row(-1.0, -1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0)
    t = tokens_at(ratio, advantages, old_log_prob=torch.full_like(ratio, math.log(0.64)))

    def weight(method):
        return method.gradient_weight(t, method.bounds(t, None)).tolist()[0]

    assert weight(Dcpo()) == [0.0, 0.51, 1.24, 0.0, 0.4, 1.3, 9.0, 0.0, 11.0]
    assert weight(Dcpo(dual_clip=None)) == [0.0, 0.51, 1.24, 0.0, 0.4, 1.3, 9.0, 11.0, 11.0]


def ppo_with_bounds(batch, epsilon_low, epsilon_high, largest_ratio, dual_clip):
    """The clipped surrogate with the paper's bounds, token by token in Python, and its gradient by autograd."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    total = 0.0
    for position in batch["response_mask"].nonzero().tolist():
        i, k = position
        A, q = batch["advantages"][i, k], math.exp(batch["old_log_prob"][i, k])
        r = (log_prob[i, k] - batch["old_log_prob"][i, k]).exp()
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * epsilon_low / q, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * epsilon_high / q), largest_ratio)
        value = torch.minimum(r * A, r.clamp(low, high) * A)
        total = total - (torch.maximum(value, dual_clip * A) if A < 0 else value)
    loss = total / batch["response_mask"].sum()
    loss.backward()
    return loss.detach(), log_prob.grad


@pytest.mark.parametrize(
    ("group", "numbers"), [("dcpo", (0.16, 0.2, 10.0, 10.0)), ("dcpo_reference", (0.2, 0.28, 10.0, 10.0))]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_registered_loss_against_autograd(group, numbers, seed):
    batch = example(seed=seed)
    batch["log_prob"] = (batch["old_log_prob"] + 4 * (batch["log_prob"] - batch["old_log_prob"])).clamp(max=0)
    batch = {
        **{name: batch[name] for name in ("log_prob", "old_log_prob", "advantages")},
        "response_mask": batch["mask"],
    }
    loss, gradient, metrics = registered_loss(built_once((f"+clipx={group}",)), batch)
    expected_loss, expected_gradient = ppo_with_bounds(batch, *numbers)
    assert_close(loss, expected_loss)
    assert_close(gradient, expected_gradient)
    assert metrics["actor/pg_clipfrac"] > 0
