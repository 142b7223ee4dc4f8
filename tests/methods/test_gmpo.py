"""GMPO's weight and value by hand, and against verl's own geo_mean.

Covers both bounds, the mean over the sequence's clipped ratios, loss and gradient where the sequences' advantages are
their tokens', as the paper has them. Does not cover verl's mean of advantages that differ within a sequence, and its
geometric mean of correction weights: ours weighs each token by itself.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.methods.gmpo import Gmpo

from .against_verl import ACTOR, ragged
from .at import row, tokens_at, weight_and_value

OURS = ("+clipx=gmpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
VERLS = (f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.clip_ratio_low=0.4", f"{ACTOR}.clip_ratio_high=0.4")


@pytest.mark.parametrize(
    ("ratios", "advantage", "expected", "mean"),
    [
        # The geometric mean of 4 and 1/4 is 1; with 4 clipped at 2 it is the root of 1/2.
        ((4.0, 0.25), 1.0, (0.0, 0.5**0.5), 0.5**0.5),
        ((4.0, 0.25), -1.0, (2.0**0.5, 0.0), 2.0**0.5),
        ((1.5, 1.5), 1.0, (1.5, 1.5), 1.5),
        ((0.25, 0.25), 2.0, (0.25, 0.25), 0.25),
        ((4.0, 4.0), -2.0, (4.0, 4.0), 4.0),
    ],
)
def test_weight_and_value_by_hand(ratios, advantage, expected, mean):
    method = Gmpo(clip_low=0.5, clip_high=2.0)
    found, value = weight_and_value(method, row(*ratios), row(advantage, advantage))
    assert_close(found, row(*expected))
    assert_close(value, row(-advantage * mean, -advantage * mean))


def test_the_defaults_are_a_width_of_0_4_on_the_log_ratio():
    assert (math.log(Gmpo().clip_low), math.log(Gmpo().clip_high)) == (pytest.approx(-0.4), pytest.approx(0.4))


def test_without_bounds_nothing_is_clipped():
    method = Gmpo(clip_low=None, clip_high=None)
    assert_close(weight_and_value(method, row(9.0, 1.0), row(1.0, 1.0))[0], row(3.0, 3.0))
    assert_close(weight_and_value(method, row(1 / 9, 1.0), row(-1.0, -1.0))[0], row(1 / 3, 1 / 3))


def test_tokens_outside_the_mask_do_not_count():
    t = tokens_at(row(4.0, 1.0, 9.0), row(-1.0, -1.0, 0.0), mask=row(True, True, False, dtype=torch.bool))
    method = Gmpo()
    weight = method.gradient_weight(t, method.bounds(t, method.decide(method.statistics(t))))
    assert_close(weight[:, :2], row(2.0, 2.0))


@pytest.mark.parametrize("spread", [1e-2, 0.5, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_same_as_verls_own(spread, seed):
    batch = {name: tensor[:-1] for name, tensor in ragged(seed, spread=spread).items()}
    batch["advantages"] = batch["advantages"][:, :1].expand(-1, 12).clone()
    found, expected = (
        registered_loss(built_once(of), batch, loss_agg_mode="seq-mean-token-mean") for of in (OURS, VERLS)
    )
    # verl divides by (tokens + 1e-8).
    assert_close(found[0], expected[0], rtol=1e-6, atol=1e-9)
    assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9)
    assert found[1].any() and (found[1] == 0).any()
