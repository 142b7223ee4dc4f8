"""DPPO's weight and value by hand, for both signs of both divergences, and the settings of verl's own dppo_tv and
dppo_kl. Not covered: the paper's top-K divergences, which need more than the sampled token, nor which policy is the old
one.
"""

import math

import pytest
import torch

from verl_clipx.losses.methods.dppo import Dppo

from .against_verl import AsVerl
from .at import HandRow, make_test_of_rows, row, tokens_at, tokens_from_to

PUBLISHED = {
    "dppo": dict(divergence="tv", threshold_low=0.2, threshold_high=0.2, weight_high=5.0),
    "dppo_kl": dict(divergence="kl", threshold_low=0.05, threshold_high=0.05, weight_high=5.0),
    "dppo_reference": dict(divergence="tv", threshold_low=0.15, threshold_high=0.15, weight_high=10000.0),
}
VARIANTS = ({"divergence": "kl"}, {"threshold_low": None, "threshold_high": None, "weight_high": None})


def same(ours, verls, low, high, truncation):
    """verl's clip ratios are the thresholds of its dppo losses, and clip_ratio_c is the truncation."""
    keys = (f"clip_ratio_low={low}", f"clip_ratio_high={high}", f"clip_ratio_c={truncation}")
    # verl's clip_fraction_lower is the share of truncated tokens, which ours is not.
    return AsVerl(ours, (f"policy_loss.loss_mode={verls}", *keys), spreads=(2.0, 15.0))


OWN = ("+clipx=dppo", "clipx.threshold_low=0.05", "clipx.threshold_high=0.3", "clipx.weight_high=1.1")
SAME_IN_VERL = {
    "dppo": same(("+clipx=dppo",), "dppo_tv", 0.2, 0.2, 5.0),
    "dppo_kl": same(("+clipx=dppo_kl",), "dppo_kl", 0.05, 0.05, 5.0),
    "dppo_reference": same(("+clipx=dppo_reference",), "dppo_tv", 0.15, 0.15, 10000.0),
    "dppo, a threshold a side": same(OWN, "dppo_tv", 0.05, 0.3, 1.1),
}


def within(threshold, **further):
    return Dppo(threshold_low=threshold, threshold_high=threshold, **{"weight_high": None, **further})


# From (1/2, 1/2) to (3/4, 1/4), either way round: log(4/3) / 2.
KL = math.log(4 / 3) / 2
MOVES = ((0.25, 0.5), (0.25, 0.5), (0.5, 0.25), (0.5, 0.25), (0.5, 0.625), (0.25, 0.5))
KL_MOVES = tokens_from_to((0.5, 0.75), (0.5, 0.75), (0.5, 0.25), (0.5, 0.25), advantages=(1.0, -1.0, 1.0, -1.0))
EQUAL = tokens_from_to((0.25, 0.5), (0.5, 0.25), advantages=(1.0, -1.0))

test_by_hand = make_test_of_rows(
    {
        # Section 4.2: a ratio of 100 that moves hardly any probability, and one of 0.81 that moves 0.19 of it.
        "the paper's example": HandRow(
            method=within(0.15),
            **tokens_from_to((1e-4, 1e-2), (0.99, 0.80), advantages=(1.0, -1.0)),
            weight=(100.0, 0.0),
        ),
        # Only what moves away from the old policy is dropped; the weight of the others is at most 1.5.
        "weight and value": HandRow(
            method=within(0.2, weight_high=1.5),
            **tokens_from_to(*MOVES, advantages=(1.0, -1.0, 1.0, -1.0, 1.0, 0.0)),
            weight=(0.0, 1.5, 0.5, 0.0, 1.25, 1.5),
            value=(0.0, 1.5 * math.log(0.5), -0.5 * math.log(0.25), 0.0, -1.25 * math.log(0.625), 0.0),
        ),
        "equal to a threshold is kept": HandRow(method=within(0.25), **EQUAL, weight=(2.0, 0.5)),
        "beyond it is not": HandRow(method=within(0.2499999), **EQUAL, weight=(0.0, 0.0)),
        "a lower threshold alone": HandRow(
            method=Dppo(threshold_low=0.1, threshold_high=None), **EQUAL, weight=(2.0, 0.0)
        ),
        "an upper one alone": HandRow(method=Dppo(threshold_low=None, threshold_high=0.1), **EQUAL, weight=(0.0, 0.5)),
        "kl drops what moves away": HandRow(
            method=within(KL - 1e-3, divergence="kl"), **KL_MOVES, weight=(0.0, 1.5, 0.5, 0.0)
        ),
        "kl keeps what is near": HandRow(
            method=within(KL + 1e-3, divergence="kl"), **KL_MOVES, weight=(1.5, 1.5, 0.5, 0.5)
        ),
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_is_a_number_where_a_probability_is_one(dtype):
    log_prob, old_log_prob = row(0.0, -1.0, 0.0, 1e-7, dtype=dtype), row(0.0, 0.0, -1.0, 0.0, dtype=dtype)
    ratio = (log_prob - old_log_prob).exp()
    found = Dppo(divergence="kl").bounded(tokens_at(ratio, torch.ones_like(ratio), old_log_prob=old_log_prob))
    assert found.isfinite().all()
    assert found[0, 0] == 0 and found[0, 1] < -0.9 and found[0, 2] > 5 and found[0, 3] < 1e-6
