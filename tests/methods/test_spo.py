"""SPO by hand at and beyond the edges of PPO's clip, and against autograd of the paper's objective.

Not covered: CFPO's own function, whose pull request no release of verl has.
"""

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.methods.spo import Spo

from .against_verl import ragged
from .at import row, weight

RATIO = row(0.6, 0.8, 1.0, 1.2, 1.4)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (2.0, (1.8, 1.6, 1.0, 0.0, -1.4)),
        (-2.0, (-0.6, 0.0, 1.0, 2.4, 4.2)),
        (0.0, (0.6, 0.8, 1.0, 1.2, 1.4)),
    ],
)
def test_the_gradient_turns_back_where_ppo_clips(advantage, expected):
    assert_close(weight(Spo(), RATIO, row(*[advantage] * 5)), row(*expected), rtol=1e-9, atol=1e-12)


def test_a_wide_epsilon_is_hardly_a_limit():
    factor = weight(Spo(epsilon=12.5), row(0.01, 1.0, 2.0), row(1.0, 1.0, 1.0)) / row(0.01, 1.0, 2.0)
    assert factor.min() >= 0.92 and factor.max() <= 1.08


def test_the_gradient_is_that_of_the_papers_objective():
    batch = ragged(3, spread=0.5)
    loss, gradient, _ = registered_loss(built_once(("+clipx=spo",)), batch)
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    A, mask, r = batch["advantages"], batch["response_mask"], (log_prob - batch["old_log_prob"]).exp()
    expected = -((r * A - A.abs() / (2 * 0.2) * (r - 1) ** 2) * mask).sum() / mask.sum()
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)
    assert torch.isfinite(gradient).all()
