"""DPPO's divergences, weight and value by hand, and against verl's own dppo_tv and dppo_kl.

Covers both signs of both divergences, equality at a threshold, the truncation, probabilities of 1, the regions, and
loss, gradient and metrics beside verl's under every aggregation. Does not cover the paper's top-K divergences, which
need more than the sampled token, nor which policy is the old one.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.check.contract import evaluate
from verl_clipx.loss.metrics import token_metrics, token_sums
from verl_clipx.methods.dppo import Dppo

from .against_verl import ACTOR, AGGREGATIONS, assert_same_as_verl, ragged
from .at import row, tokens_at

# verl's clip ratios are the thresholds of its dppo losses, and clip_ratio_c is the truncation.
SAME = {
    "tv": (("+clipx=dppo",), "dppo_tv", 0.2, 5.0),
    "kl": (("+clipx=dppo_kl",), "dppo_kl", 0.05, 5.0),
    "reference": (("+clipx=dppo_reference",), "dppo_tv", 0.15, 10000.0),
}
# verl's clip_fraction_lower is the share of truncated tokens, which ours is not.
SAME_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl")


def moved(*probabilities: tuple[float, float], advantages: tuple[float, ...]):
    """Tokens from old to current probabilities."""
    q, p = row(*(old for old, _ in probabilities)), row(*(current for _, current in probabilities))
    return tokens_at(p / q, row(*advantages), old_log_prob=q.log())


def weight_and_value(method, t):
    bounds = method.bounds(t, method.decide(method.statistics(t)))
    weight = method.gradient_weight(t, bounds)
    return weight, method.loss_value(t, bounds, weight)


def test_the_papers_example():
    # Section 4.2: a ratio of 100 that moves hardly any probability, and one of 0.81 that moves 0.19 of it.
    t = moved((1e-4, 1e-2), (0.99, 0.80), advantages=(1.0, -1.0))
    assert_close(Dppo().bounded(t), row(0.0099, -0.19))
    found, _ = weight_and_value(Dppo(threshold_low=0.15, threshold_high=0.15, weight_high=None), t)
    assert_close(found, row(100.0, 0.0))


def test_weight_and_value_by_hand():
    moves = ((0.25, 0.5), (0.25, 0.5), (0.5, 0.25), (0.5, 0.25), (0.5, 0.625), (0.25, 0.5))
    t = moved(*moves, advantages=(1.0, -1.0, 1.0, -1.0, 1.0, 0.0))
    method = Dppo(threshold_low=0.2, threshold_high=0.2, weight_high=1.5)
    assert_close(method.bounded(t), row(0.25, 0.25, -0.25, -0.25, 0.125, 0.25))
    found, value = weight_and_value(method, t)
    # Only what moves away from the old policy is dropped; the weight of the others is at most 1.5.
    assert_close(found, row(0.0, 1.5, 0.5, 0.0, 1.25, 1.5))
    log_half, log_quarter = math.log(0.5), math.log(0.25)
    assert_close(value, row(0.0, 1.5 * log_half, -0.5 * log_quarter, 0.0, -1.25 * math.log(0.625), 0.0))


def test_equal_to_a_threshold_is_kept():
    t = moved((0.25, 0.5), (0.5, 0.25), advantages=(1.0, -1.0))
    at, below = (Dppo(threshold_low=one, threshold_high=one, weight_high=None) for one in (0.25, 0.2499999))
    assert_close(weight_and_value(at, t)[0], row(2.0, 0.5))
    assert weight_and_value(below, t)[0].tolist() == [[0.0, 0.0]]


def test_each_side_has_its_threshold():
    t = moved((0.25, 0.5), (0.5, 0.25), advantages=(1.0, -1.0))
    for sides, expected in (
        ({"threshold_low": 0.1, "threshold_high": None}, (2.0, 0.0)),
        ({"threshold_low": None, "threshold_high": 0.1}, (0.0, 0.5)),
    ):
        assert_close(weight_and_value(Dppo(**sides), t)[0], row(*expected))


def test_kl_by_hand():
    t = moved((0.5, 0.75), (0.5, 0.25), (0.75, 0.5), (0.3, 0.3), advantages=(1.0, 1.0, 1.0, 1.0))
    # From (1/2, 1/2) to (3/4, 1/4), either way round: log(4/3) / 2.
    even = math.log(4 / 3) / 2
    uneven = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert_close(Dppo(divergence="kl").bounded(t), row(even, -even, -uneven, 0.0), rtol=1e-6, atol=1e-12)


def test_kl_drops_what_moves_away():
    t = moved((0.5, 0.75), (0.5, 0.75), (0.5, 0.25), (0.5, 0.25), advantages=(1.0, -1.0, 1.0, -1.0))
    kl = math.log(4 / 3) / 2
    tight, wide = (
        Dppo(divergence="kl", threshold_low=one, threshold_high=one, weight_high=None) for one in (kl - 1e-3, kl + 1e-3)
    )
    assert_close(weight_and_value(tight, t)[0], row(0.0, 1.5, 0.5, 0.0))
    assert_close(weight_and_value(wide, t)[0], row(1.5, 1.5, 0.5, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_is_a_number_where_a_probability_is_one(dtype):
    log_prob, old_log_prob = row(0.0, -1.0, 0.0, 1e-7, dtype=dtype), row(0.0, 0.0, -1.0, 0.0, dtype=dtype)
    ratio = (log_prob - old_log_prob).exp()
    t = tokens_at(ratio, torch.ones_like(ratio), old_log_prob=old_log_prob)
    found = Dppo(divergence="kl").bounded(t)
    assert found.isfinite().all()
    assert found[0, 0] == 0 and found[0, 1] < -0.9 and found[0, 2] > 5 and found[0, 3] < 1e-6


def test_regions_are_counted_by_the_divergence():
    method = Dppo()
    # Ratios of 3 and 0.5 that move little, and one of 1.5 that moves much.
    t = moved((0.01, 0.03), (0.02, 0.01), (0.5, 0.75), (0.75, 0.5), advantages=(1.0, -1.0, 1.0, -1.0))
    bounds = method.bounds(t, method.decide(method.statistics(t)))
    weighted = method.gradient_weight(t, bounds) * t.advantages
    metrics = token_metrics(token_sums(t, method.bounded(t), bounds, weighted, None, None, True), detailed=True)
    names = ("clip_fraction_high", "clip_fraction_low", "region_fraction/M")
    assert [metrics[f"clipx/{name}"].item() for name in names] == [1, 1, 2]
    assert metrics["actor/pg_clipfrac"] == 2
    assert metrics["clipx/gradient_mass/HP"] == metrics["clipx/gradient_mass/LN"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", SAME)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("spread", [2.0, 15.0])
def test_same_as_verls_own(variant, mode, spread):
    ours, name, threshold, truncation = SAME[variant]
    verls = (
        f"{ACTOR}.policy_loss.loss_mode={name}",
        f"{ACTOR}.clip_ratio_low={threshold}",
        f"{ACTOR}.clip_ratio_high={threshold}",
        f"{ACTOR}.clip_ratio_c={truncation}",
    )
    assert_same_as_verl(ours, verls, ragged(0, spread=spread), mode, SAME_METRICS)


def test_same_as_verls_own_with_a_threshold_a_side():
    ours = ("+clipx=dppo", "clipx.threshold_low=0.05", "clipx.threshold_high=0.3", "clipx.weight_high=1.1")
    verls = (
        f"{ACTOR}.policy_loss.loss_mode=dppo_tv",
        f"{ACTOR}.clip_ratio_low=0.05",
        f"{ACTOR}.clip_ratio_high=0.3",
        f"{ACTOR}.clip_ratio_c=1.1",
    )
    assert_same_as_verl(ours, verls, ragged(1, spread=0.7), "token-mean", SAME_METRICS)


@pytest.mark.parametrize("method", [Dppo(), Dppo(divergence="kl", threshold_low=0.05, threshold_high=0.05)])
def test_each_branch_occurs_beside_verls(method):
    batch = ragged(0, spread=2.0)
    mask, A = batch.pop("response_mask"), batch["advantages"]
    found = evaluate(method, **batch, mask=mask)
    for sign in (A > 0, A < 0):
        for branch in (found.weight == 0, found.weight == 5, (found.weight != 0) & (found.weight != 5)):
            assert (branch & sign & mask).any()
