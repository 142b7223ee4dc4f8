"""CISPO's weight and value by hand; verl's, the paper's and ACPO's numbers are in the golden vectors."""

import math

from tests.golden.settings import EPSILONS, UNCLAMPED, Setup, above, below, bounds
from verl_clipx.losses.methods.cispo import Cispo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {
    "cispo": dict(clip_low=0.8, clip_high=1.2, mask_low=None, mask_high=None),
    "cispo_minimax": dict(clip_low=None, mask_low=None, mask_high=None),
    "cispo_acpo": dict(clip_low=None, clip_high=1.45, mask_low=0.8, mask_high=1.3),
}
GOLDEN = {
    "acpo_cispo": Setup(
        "cispo_acpo",
        {
            # The release's lower bound of 1 - 1 bounds nothing, which the group writes as null.
            "clip_low": ("clip_ratio_is_low", lambda epsilon: below(epsilon) or None),
            "clip_high": ("clip_ratio_is_high", above),
            "mask_low": ("cliprange_low", below),
            "mask_high": ("cliprange_high", above),
        },
    ),
    "verl091_cispo": Setup("cispo", bounds("clip_ratio_low", "clip_ratio_high")),
    "paper_cispo": Setup("cispo", EPSILONS, UNCLAMPED),
}
# verl's clip fraction counts every clamped weight (tests/training/worker/test_golden.py).
SAME_IN_VERL = {
    "cispo": SameInVerl(
        overrides=("+clipx=cispo",),
        verl_overrides=("policy_loss.loss_mode=cispo",),
        metrics=("ppo_kl",),
        spreads=(0.05, 1.0, 12.0),
        weighted=True,
    )
}

test_by_hand = make_test_of_rows(
    {
        **{
            f"every token keeps the clamped ratio, A = {A}": HandRow(
                method=Cispo(), ratio=(0.5, 0.8, 1.0, 1.2, 9.0), advantages=A, weight=(0.8, 0.8, 1.0, 1.2, 1.2)
            )
            for A in (1.0, -1.0, 0.0)
        },
        "MiniMax's has no lower bound": HandRow(
            method=Cispo(clip_low=None, clip_high=5.0), ratio=(1e-6, 9.0), advantages=(-1.0, 1.0), weight=(1e-6, 5.0)
        ),
        "no token loses its gradient to the clamp": HandRow(
            method=Cispo(clip_low=None, clip_high=None, log_ratio_clamp=2.0),
            ratio=(1e-6, 9.0),
            advantages=(-1.0, 1.0),
            weight=(math.exp(-2.0), math.exp(2.0)),
        ),
        "the mask drops what PPO with its bounds would clip": HandRow(
            method=Cispo(clip_low=None, clip_high=1.45, mask_low=0.75, mask_high=1.3),
            ratio=(0.5, 0.5, 0.75, 1.3, 1.4, 1.4, 2.0),
            advantages=(-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0),
            weight=(0.0, 0.5, 0.75, 1.3, 0.0, 1.4, 1.45),
        ),
        "its lower side alone": HandRow(
            method=Cispo(clip_low=None, clip_high=3.0, mask_low=0.8),
            ratio=(0.5, 2.0),
            advantages=(-1.0, 1.0),
            weight=(0.0, 2.0),
        ),
        "its upper side alone": HandRow(
            method=Cispo(clip_low=None, clip_high=3.0, mask_high=1.2),
            ratio=(0.5, 2.0),
            advantages=(-1.0, 1.0),
            weight=(0.5, 0.0),
        ),
        "value": HandRow(
            method=Cispo(),
            ratio=(0.8, 1.2),
            advantages=(2.0, -1.0),
            weight=(0.8, 1.2),
            old=(0.5, 0.25),
            value=(-1.6 * math.log(0.4), 1.2 * math.log(0.3)),
        ),
    }
)
