"""DRO's gradient and value by hand, also where A is 0 and F is not defined, and against verl's own dro. Not
covered: that F times A is the gradient elsewhere, which is part of the contract; the receipt.
"""

import math

from torch.testing import assert_close

from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.dro import Dro

from .against_verl import AsVerl
from .at import HandRow, make_test_of_rows, row, tokens_at

PUBLISHED = {"dro": dict(beta=0.05, log_ratio_clamp=None)}
VARIANTS = ({"beta": 100, "log_ratio_clamp": None},)
OURS = ("+clipx=dro", "clipx.beta=0.3")
KEY = "policy_loss.dro_beta=0.3"
OF_VERL = dict(verls=("policy_loss.loss_mode=dro", KEY), metrics=("ppo_kl",), change=lambda batch: zero_some(batch))
SAME_IN_VERL = {
    "dro": AsVerl(OURS, spreads=(1e-2, 0.7, 15.0), **OF_VERL),
    "dro by verl's key": AsVerl(("+clipx=dro", f"actor_rollout_ref.actor.{KEY}"), **OF_VERL),
}
LOG_2 = math.log(2)
RATIO, ADVANTAGES = (1.0, 2.0, 2.0, 0.5), (2.0, -1.0, 0.0, 4.0)
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
    found = Dro(beta=0.5).gradient(tokens_at(row(*RATIO), row(*ADVANTAGES)), Bounds(0.0, math.inf), row(*WEIGHT))
    assert_close(found, row(2.0, -1 - 0.5 * LOG_2, -0.5 * LOG_2, 4 + 0.5 * LOG_2))


def zero_some(batch):
    batch["advantages"][::2] = 0.0
