"""DRO's gradient and value by hand, also where A is 0 and F is not defined, with the receipt there, and against verl's
own dro. Not covered: that F times A is the gradient elsewhere, which is part of the contract.
"""

import copy
import math

import pytest
from torch.testing import assert_close
from verl.trainer.ppo import core_algos

from tests.composition import built_once
from verl_clipx.methods import Bounds
from verl_clipx.methods.dro import Dro

from .against_verl import AsVerl
from .at import At, by_hand, row, tokens_at

PUBLISHED = {"dro": dict(beta=0.05, log_ratio_clamp=None)}
VARIANTS = ({"beta": 100, "log_ratio_clamp": None},)
OURS = ("+clipx=dro", "clipx.beta=0.3")
KEY = "policy_loss.dro_beta=0.3"
OF_VERL = dict(verls=("policy_loss.loss_mode=dro", KEY), metrics=("ppo_kl",), change=lambda batch: zero_some(batch))
VERLS = {
    "dro": AsVerl(OURS, spreads=(1e-2, 0.7, 15.0), **OF_VERL),
    "dro by verl's key": AsVerl(("+clipx=dro", f"actor_rollout_ref.actor.{KEY}"), **OF_VERL),
}
LOG_2 = math.log(2)
RATIO, ADVANTAGES = (1.0, 2.0, 2.0, 0.5), (2.0, -1.0, 0.0, 4.0)
WEIGHT = (1.0, 1 + 0.5 * LOG_2, 0.0, 1 + 0.125 * LOG_2)

test_by_hand = by_hand(
    {
        "weight and value": At(
            Dro(beta=0.5),
            *(RATIO, ADVANTAGES, WEIGHT),
            value=(0.0, 0.25 * LOG_2**2 + LOG_2, 0.25 * LOG_2**2, 0.25 * LOG_2**2 + 4 * LOG_2),
        )
    }
)


def test_the_gradient_pulls_where_the_advantage_is_0():
    found = Dro(beta=0.5).gradient(tokens_at(row(*RATIO), row(*ADVANTAGES)), Bounds(0.0, math.inf), row(*WEIGHT))
    assert_close(found, row(2.0, -1 - 0.5 * LOG_2, -0.5 * LOG_2, 4 + 0.5 * LOG_2))


def zero_some(batch):
    batch["advantages"][::2] = 0.0


def without_advantages(data):
    data["advantages"] = data["advantages"] * 0


def test_the_receipt_knows_the_pull_where_the_advantages_are_0(monkeypatch):
    from tests.worker.test_receipt import Update

    config = copy.deepcopy(built_once(OURS))
    update = Update(config)
    update.run(change=without_advantages)
    assert update.run(moved=0.5, change=without_advantages).any()
    assert update.end_rollout_batch(4) < 1e-5
    assert "in the backward pass of 2 micro-batches in 2 updates to" in str(update.receipt)
    other = copy.deepcopy(built_once(("+clipx=dro", "clipx.beta=0.2")))
    other.global_batch_info.update(dp_size=1, batch_num_tokens=25, global_batch_size=6)
    registered = core_algos.POLICY_LOSS_REGISTRY["clipx_dro"]
    monkeypatch.setitem(
        core_algos.POLICY_LOSS_REGISTRY, "clipx_dro", lambda **given: registered(**given | {"config": other})
    )
    with pytest.raises(RuntimeError, match="receipt: at ratios"):
        Update(config).run(change=without_advantages)
