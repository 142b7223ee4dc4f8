"""prime-rl's IPO by hand, at and beyond the threshold, and against autograd, with its quadratic term too. Not covered:
prime-rl's own function, which no package on the index has; which policy the change is measured from.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.ipo import Ipo

from .against_verl import assert_gradient_of, ragged
from .hand_rows import HandRow, make_test_of_rows, row, tokens_at, tokens_from_to

PUBLISHED = {"ipo": dict(threshold=0.3, kl_tau=0, ratio_cap=None), "ipo_reference": dict(threshold=0.3, ratio_cap=1e4)}
VARIANTS = ({"threshold": None}, {"kl_tau": 1e-3}, {"kl_tau": 100}, {"ratio_cap": 1})
LOG_2 = math.log(2)
# Changes of 0.25, 0.5, -0.25 and -0.5; equal to the threshold is kept.
MOVES = ((0.25, 0.5), (0.25, 0.75), (0.5, 0.25), (0.75, 0.25))

test_a_token_that_moved_too_far_is_dropped_for_every_sign = make_test_of_rows(
    {
        **{
            f"A = {A}": HandRow(
                method=Ipo(threshold=0.25), **tokens_from_to(*MOVES, advantages=A), weight=(2.0, 0.0, 0.5, 0.0)
            )
            for A in (1.0, -1.0, 0.0)
        },
        "no threshold": HandRow(
            method=Ipo(threshold=None), **tokens_from_to(*MOVES, advantages=1.0), weight=(2.0, 3.0, 0.5, 1 / 3)
        ),
        "pulled back, kept or dropped": HandRow(
            method=Ipo(threshold=0.25, kl_tau=0.5),
            **tokens_from_to((0.25, 0.5), (0.25, 0.75), (0.5, 0.25), advantages=2.0),
            weight=(2 - LOG_2 / 2, -math.log(3) / 2, 0.5 + LOG_2 / 2),
            value=(LOG_2**2 / 2 - 4, math.log(3) ** 2 / 2, LOG_2**2 / 2 - 1),
        ),
        "a large ratio of a rare token": HandRow(
            method=Ipo(), **tokens_from_to((0.001, 0.2), advantages=1.0), weight=(200.0,)
        ),
        # It passes |p - q| <= 0.3, and in a mean over 1e5 tokens it alone weighs three times as much as all others.
        "a ratio of 3e5": HandRow(method=Ipo(), **tokens_from_to((1e-6, 0.3), advantages=1.0), weight=(3e5,)),
        "the same capped, whichever sign": HandRow(
            method=Ipo(ratio_cap=1e4),
            **tokens_from_to((1e-6, 0.3), (1e-6, 0.3), (1e-6, 0.5), (0.5, 0.25), advantages=(1.0, -1.0, 1.0, 1.0)),
            weight=(1e4, 1e4, 0.0, 0.5),
            value=(-1e4, 1e4, 0.0, -0.5),
        ),
        "beyond the clamp of the log-ratio too": HandRow(
            method=Ipo(ratio_cap=1e4), **tokens_from_to((1e-12, 0.3), advantages=1.0), weight=(1e4,)
        ),
    }
)


def test_the_pull_is_there_where_the_advantage_is_0():
    t = tokens_at(row(1.0, 2.0, 0.5), row(0.0, 0.0, 1.0))
    gradient = Ipo(kl_tau=0.5).gradient(t, Bounds(-1.0, 1.0), row(1.0, 2.0, 0.75))
    assert_close(gradient, row(0.0, -LOG_2, 0.75))


@pytest.mark.parametrize("kl_tau", [0.0, 0.3])
def test_the_gradient_is_that_of_the_stated_objective(kl_tau):
    batch = ragged(3, spread=0.8)
    old = batch["old_log_prob"]

    def objective(log_prob):
        kept = ((log_prob.exp() - old.exp()).abs() <= 0.3).detach()
        assert (~kept & batch["response_mask"]).any()
        surrogate = torch.where(kept, (log_prob - old).exp() * batch["advantages"], 0.0)
        return surrogate - kl_tau * (log_prob - old).square()

    assert_gradient_of("ipo", batch, objective, (f"clipx.kl_tau={kl_tau}",))
