"""DRO's gradient and value by hand, also where A is 0 and F is not defined, and against verl's own dro. Not
covered: that F times A is the gradient elsewhere, which is part of the contract; the receipt.
"""

import math

from torch.testing import assert_close

from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.dro import Dro

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows, row, tokens_at

PUBLISHED = {"dro": dict(beta=0.05, log_ratio_clamp=None)}
VARIANTS = ({"beta": 100, "log_ratio_clamp": None},)


def make_some_advantages_zero(batch):
    batch["advantages"][::2] = 0.0


VERL_OVERRIDES = ("policy_loss.loss_mode=dro", "policy_loss.dro_beta=0.3")
SAME_IN_VERL = {
    "dro": SameInVerl(
        overrides=("+clipx=dro", "clipx.beta=0.3"),
        verl_overrides=VERL_OVERRIDES,
        metrics=("ppo_kl",),
        spreads=(1e-2, 0.7, 15.0),
        change_batch=make_some_advantages_zero,
    ),
    "dro by verl's key": SameInVerl(
        overrides=("+clipx=dro", "actor_rollout_ref.actor.policy_loss.dro_beta=0.3"),
        verl_overrides=VERL_OVERRIDES,
        metrics=("ppo_kl",),
        change_batch=make_some_advantages_zero,
    ),
}
LOG_2 = math.log(2)
RATIO = (1.0, 2.0, 2.0, 0.5)
ADVANTAGES = (2.0, -1.0, 0.0, 4.0)
WEIGHT = (1.0, 1 + 0.5 * LOG_2, 0.0, 1 + 0.125 * LOG_2)

test_by_hand = make_test_of_rows(
    {
        "weight and value": HandRow(
            method=Dro(beta=0.5),
            ratio=RATIO,
            advantages=ADVANTAGES,
            weight=WEIGHT,
            value=(0.0, 0.25 * LOG_2**2 + LOG_2, 0.25 * LOG_2**2, 0.25 * LOG_2**2 + 4 * LOG_2),
        )
    }
)


def test_the_gradient_pulls_where_the_advantage_is_0():
    t = tokens_at(row(*RATIO), row(*ADVANTAGES))
    gradient = Dro(beta=0.5).gradient(t, Bounds(0.0, math.inf), row(*WEIGHT))
    assert_close(gradient, row(2.0, -1 - 0.5 * LOG_2, -0.5 * LOG_2, 4 + 0.5 * LOG_2))
