"""DPPO's weight and value by hand, for both signs of both divergences, and the settings of verl's own dppo_tv and
dppo_kl. Not covered: the paper's top-K divergences, which need more than the sampled token, nor which policy is the old
one.
"""

import math

import pytest
import torch

from verl_clipx.losses.methods.dppo import Dppo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows, row, tokens_at, tokens_from_to

PUBLISHED = {
    "dppo": dict(divergence="tv", threshold_low=0.2, threshold_high=0.2, weight_high=5.0),
    "dppo_kl": dict(divergence="kl", threshold_low=0.05, threshold_high=0.05, weight_high=5.0),
    "dppo_reference": dict(divergence="tv", threshold_low=0.15, threshold_high=0.15, weight_high=10000.0),
}
VARIANTS = ({"divergence": "kl"}, {"threshold_low": None, "threshold_high": None, "weight_high": None})


def make_case(overrides, *, verl_loss, threshold_low, threshold_high, weight_high):
    """Return a comparison; verl's clip ratios are the thresholds of its dppo losses, clip_ratio_c caps the weight."""
    # verl's pg_clipfrac_lower is the share of capped tokens, which ours is not.
    return SameInVerl(
        overrides=overrides,
        verl_overrides=(
            f"policy_loss.loss_mode={verl_loss}",
            f"clip_ratio_low={threshold_low}",
            f"clip_ratio_high={threshold_high}",
            f"clip_ratio_c={weight_high}",
        ),
        spreads=(2.0, 15.0),
    )


SAME_IN_VERL = {
    "dppo": make_case(("+clipx=dppo",), verl_loss="dppo_tv", threshold_low=0.2, threshold_high=0.2, weight_high=5.0),
    "dppo_kl": make_case(
        ("+clipx=dppo_kl",), verl_loss="dppo_kl", threshold_low=0.05, threshold_high=0.05, weight_high=5.0
    ),
    "dppo_reference": make_case(
        ("+clipx=dppo_reference",), verl_loss="dppo_tv", threshold_low=0.15, threshold_high=0.15, weight_high=10000.0
    ),
    "dppo, a threshold a side": make_case(
        ("+clipx=dppo", "clipx.threshold_low=0.05", "clipx.threshold_high=0.3", "clipx.weight_high=1.1"),
        verl_loss="dppo_tv",
        threshold_low=0.05,
        threshold_high=0.3,
        weight_high=1.1,
    ),
}


def make_dppo(threshold, *, weight_high=None, divergence="tv"):
    """Return DPPO with the same threshold on both sides."""
    return Dppo(threshold_low=threshold, threshold_high=threshold, weight_high=weight_high, divergence=divergence)


# The divergence from (1/2, 1/2) to (3/4, 1/4), or to (1/4, 3/4).
KL = math.log(4 / 3) / 2
KL_MOVES = tokens_from_to((0.5, 0.75), (0.5, 0.75), (0.5, 0.25), (0.5, 0.25), advantages=(1.0, -1.0, 1.0, -1.0))
MOVES_BY_A_QUARTER = tokens_from_to((0.25, 0.5), (0.5, 0.25), advantages=(1.0, -1.0))

test_by_hand = make_test_of_rows(
    {
        # Section 4.2: a ratio of 100 that moves hardly any probability, and one of 0.81 that moves 0.19 of it.
        "the paper's example": HandRow(
            method=make_dppo(0.15),
            **tokens_from_to((1e-4, 1e-2), (0.99, 0.80), advantages=(1.0, -1.0)),
            weight=(100.0, 0.0),
        ),
        # Only what moves away from the old policy is dropped; the weight of the others is at most 1.5.
        "weight and value": HandRow(
            method=make_dppo(0.2, weight_high=1.5),
            **tokens_from_to(
                (0.25, 0.5),
                (0.25, 0.5),
                (0.5, 0.25),
                (0.5, 0.25),
                (0.5, 0.625),
                (0.25, 0.5),
                advantages=(1.0, -1.0, 1.0, -1.0, 1.0, 0.0),
            ),
            weight=(0.0, 1.5, 0.5, 0.0, 1.25, 1.5),
            value=(0.0, 1.5 * math.log(0.5), -0.5 * math.log(0.25), 0.0, -1.25 * math.log(0.625), 0.0),
        ),
        "equal to a threshold is kept": HandRow(method=make_dppo(0.25), **MOVES_BY_A_QUARTER, weight=(2.0, 0.5)),
        "beyond it is not": HandRow(method=make_dppo(0.2499999), **MOVES_BY_A_QUARTER, weight=(0.0, 0.0)),
        "a lower threshold alone": HandRow(
            method=Dppo(threshold_low=0.1, threshold_high=None), **MOVES_BY_A_QUARTER, weight=(2.0, 0.0)
        ),
        "an upper one alone": HandRow(
            method=Dppo(threshold_low=None, threshold_high=0.1), **MOVES_BY_A_QUARTER, weight=(0.0, 0.5)
        ),
        "kl drops what moves away": HandRow(
            method=make_dppo(KL - 1e-3, divergence="kl"), **KL_MOVES, weight=(0.0, 1.5, 0.5, 0.0)
        ),
        "kl keeps what is near": HandRow(
            method=make_dppo(KL + 1e-3, divergence="kl"), **KL_MOVES, weight=(1.5, 1.5, 0.5, 0.5)
        ),
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_is_a_number_where_a_probability_is_one(dtype):
    log_prob = row(0.0, -1.0, 0.0, 1e-7, dtype=dtype)
    old_log_prob = row(0.0, 0.0, -1.0, 0.0, dtype=dtype)
    ratio = (log_prob - old_log_prob).exp()
    divergence = Dppo(divergence="kl").bounded(tokens_at(ratio, torch.ones_like(ratio), old_log_prob=old_log_prob))
    assert divergence.isfinite().all()
    unmoved, fell_from_one, rose_to_one, rounded_above_one = divergence[0].tolist()
    assert unmoved == 0
    assert fell_from_one < -0.9
    assert rose_to_one > 5
    assert rounded_above_one < 1e-6
