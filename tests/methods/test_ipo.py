"""prime-rl's IPO by hand: the probability's change at and beyond the threshold, both signs, and its quadratic term.

Covers the contract and, where kl_tau is 0 and by autograd where it isn't, the gradient of the stated objective. Not
covered: prime-rl's own function, which no package on the index has; which policy the change is measured from.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.check.contract import CHECKS
from verl_clipx.methods.ipo import Ipo

from .against_verl import assert_parts_add_up, ragged
from .at import row, tokens_at


def moved(*probabilities: tuple[float, float], advantages: tuple[float, ...]):
    """Tokens from old to current probabilities."""
    q, p = row(*(old for old, _ in probabilities)), row(*(current for _, current in probabilities))
    return tokens_at(p / q, row(*advantages), old_log_prob=q.log())


def weight(method, t):
    return method.gradient_weight(t, method.bounds(t, method.decide(method.statistics(t))))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_token_that_moved_too_far_is_dropped_for_every_sign(advantage):
    # Changes of 0.25, 0.5, -0.25 and -0.5; equal to the threshold is kept.
    t = moved((0.25, 0.5), (0.25, 0.75), (0.5, 0.25), (0.75, 0.25), advantages=(advantage,) * 4)
    assert_close(weight(Ipo(threshold=0.25), t), row(2.0, 0.0, 0.5, 0.0))
    assert_close(weight(Ipo(threshold=None), t), row(2.0, 3.0, 0.5, 1 / 3))


def test_a_large_ratio_of_a_rare_token_is_kept():
    assert_close(weight(Ipo(), moved((0.001, 0.2), advantages=(1.0,))), row(200.0))


def test_the_quadratic_term_pulls_every_token_back():
    method = Ipo(threshold=0.25, kl_tau=0.1)
    t = moved((0.25, 0.5), (0.25, 0.75), (0.5, 0.5), advantages=(3.0, 3.0, 0.0))
    bounds = method.bounds(t, method.decide(method.statistics(t)))
    F = method.gradient_weight(t, bounds)
    expected = row(6.0 - 0.2 * math.log(2), -0.2 * math.log(3), 0.0)
    assert_close(method.gradient(t, F), expected)
    assert_close(method.loss_value(t, bounds, F), row(0.1 * math.log(2) ** 2 - 6.0, 0.1 * math.log(3) ** 2, 0.0))


@pytest.mark.parametrize("kl_tau", [0.0, 0.05])
def test_the_gradient_is_that_of_the_stated_objective(kl_tau):
    batch = ragged(3, spread=0.8)
    loss, gradient, _ = registered_loss(built_once(("+clipx=ipo", f"clipx.kl_tau={kl_tau}")), batch)
    mask, old = batch["response_mask"], batch["old_log_prob"]
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    kept = ((log_prob.exp() - old.exp()).abs() <= 0.3).detach()
    log_ratio = log_prob - old
    objective = torch.where(kept, log_ratio.exp() * batch["advantages"], 0.0) - kl_tau * log_ratio.square()
    expected = -(objective * mask).sum() / mask.sum()
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)
    assert (~kept & mask).any()


def test_micro_batches_of_whole_sequences_add_up():
    assert_parts_add_up(("+clipx=ipo",), ragged(1, spread=0.7))


@pytest.mark.parametrize("method", [Ipo(), Ipo(threshold=0.1), Ipo(threshold=None)])
def test_the_contract_passes(method):
    for check in CHECKS:
        check(method)
