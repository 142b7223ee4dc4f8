"""SAPO's weight and value by hand, and against verl's own sapo.

Covers both temperatures, the peak, the clamp, that the weight is the derivative of the value, loss, gradient and
metrics beside verl's, which hard-codes seq-mean-token-mean. Does not cover other aggregations beside verl's.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.methods.sapo import Sapo

from .against_verl import ACTOR, assert_same_as_verl, ragged
from .at import row, weight_and_value

OURS = ("+clipx=sapo",)
VERLS = (f"{ACTOR}.policy_loss.loss_mode=sapo",)
SAME_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl")


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_the_ratio_itself_at_one(advantage):
    found, value = weight_and_value(Sapo(tau_positive=2.0, tau_negative=4.0), row(1.0), row(advantage))
    assert found.item() == 1.0
    # 4 / tau * sigmoid(0)
    assert value.item() == pytest.approx(-advantage * (1.0 if advantage > 0 else 0.5), rel=1e-15)


def test_weight_and_value_by_hand():
    # sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4: 4 * 3/4 * 1/4 = 3/4, times r.
    positive, negative = math.log(3), 2 * math.log(3)
    method = Sapo(tau_positive=positive, tau_negative=negative)
    ratio, advantages = row(2.0, 1.5, 0.5), row(1.0, -2.0, -1.0)
    found, value = weight_and_value(method, ratio, advantages)
    assert_close(found, row(0.75 * 2.0, 0.75 * 1.5, 0.75 * 0.5))
    assert_close(value, row(-3 / positive, 2 * 3 / negative, 1 / negative))


def test_a_larger_temperature_is_a_narrower_gate():
    ratio, advantages = row(0.5, 2.0), row(1.0, 1.0)
    wide, narrow = (weight_and_value(Sapo(tau_positive=tau), ratio, advantages)[0] for tau in (0.5, 5.0))
    assert (narrow < wide).all() and (wide < ratio).all()


def test_weight_is_the_values_derivative():
    log_ratio = torch.linspace(-3, 3, 41, dtype=torch.float64)[None].requires_grad_(True)
    ratio = log_ratio.exp()
    for sign, tau in ((1.0, 0.7), (-1.0, 3.0)):
        method = Sapo(tau_positive=0.7, tau_negative=3.0)
        advantages = torch.full_like(ratio, sign).detach()
        (expected,) = torch.autograd.grad(
            (4 / tau * torch.sigmoid(tau * (ratio - 1))).sum(), log_ratio, retain_graph=True
        )
        found, value = weight_and_value(method, ratio.detach(), advantages)
        # Autograd's 1 - sigmoid rounds where the gate closes.
        assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert_close(value, -sign * 4 / tau * torch.sigmoid(tau * (ratio.detach() - 1)))


def test_beyond_the_clamp_there_is_value_but_no_gradient():
    ratio, advantages = row(math.exp(-25), math.exp(25)), row(1.0, 1.0)
    found, value = weight_and_value(Sapo(), ratio, advantages)
    assert found.tolist() == [[0.0, 0.0]]
    assert_close(value, row(-4 / (1 + math.e), -4.0))
    # Without a clamp the small ratio keeps its gradient; the gate has long closed on the large one.
    found, _ = weight_and_value(Sapo(log_ratio_clamp=None), ratio, advantages)
    assert_close(found, row(4 * math.e / (1 + math.e) ** 2 * math.exp(-25), 0.0), rtol=1e-9, atol=0)


def test_there_are_no_bounds():
    assert Sapo().bounds(None, None) == (0.0, math.inf)


@pytest.mark.parametrize("spread", [1e-2, 0.7, 15.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_same_as_verls_own(spread, seed):
    assert_same_as_verl(OURS, VERLS, ragged(seed, spread=spread), "seq-mean-token-mean", SAME_METRICS)


def test_same_as_verls_own_at_other_temperatures():
    ours = (*OURS, "clipx.tau_positive=3", "clipx.tau_negative=0.4")
    verls = (*VERLS, f"{ACTOR}.tau_pos=3", f"{ACTOR}.tau_neg=0.4")
    assert_same_as_verl(ours, verls, ragged(3, spread=0.7), "seq-mean-token-mean", SAME_METRICS)
