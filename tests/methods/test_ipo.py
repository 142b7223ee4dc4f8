"""prime-rl's IPO by hand: the probability's change at and beyond the threshold, for both signs; against autograd.

Not covered: prime-rl's own function, which no package on the index has; its quadratic term, which is not here; which
policy the change is measured from.
"""

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.methods.ipo import Ipo

from .against_verl import ragged
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


def test_the_gradient_is_that_of_the_stated_objective():
    batch = ragged(3, spread=0.8)
    loss, gradient, _ = registered_loss(built_once(("+clipx=ipo",)), batch)
    mask, old = batch["response_mask"], batch["old_log_prob"]
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    kept = ((log_prob.exp() - old.exp()).abs() <= 0.3).detach()
    objective = torch.where(kept, (log_prob - old).exp() * batch["advantages"], 0.0)
    expected = -(objective * mask).sum() / mask.sum()
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)
    assert (~kept & mask).any()
