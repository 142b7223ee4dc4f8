"""GRPO's weight and surrogate by hand: at the bounds, the dual clip and the clamp, and with bounds of each token.
verl's numbers are in the golden vectors; ACPO and BAPO share the surrogate.
"""

import math

from tests.golden.settings import EPSILONS, OF_RELEASES, UNCLAMPED, Setup, bounds
from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.grpo import Grpo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows, row

PUBLISHED = {
    "grpo": dict(clip_low=0.8, clip_high=1.2, dual_clip=3.0, log_ratio_clamp=20.0),
    "dapo": dict(clip_low=0.8, clip_high=1.28, dual_clip=3.0),
}
DUAL_CLIP = {"dual_clip": "clip_ratio_c"}
GOLDEN = {
    "acpo_dapo": Setup("dapo", OF_RELEASES),
    "dgpo_ppo": Setup("grpo", EPSILONS | DUAL_CLIP),
    "verl091_vanilla": Setup("dapo", bounds("clip_ratio_low", "clip_ratio_high") | DUAL_CLIP),
    "paper_grpo": Setup("grpo", EPSILONS, ("clipx.dual_clip=null", *UNCLAMPED)),
}
SAME_IN_VERL = {
    "grpo": SameInVerl(
        overrides=("+clipx=grpo",),
        verl_overrides=("policy_loss.loss_mode=vanilla",),
        metrics=("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
        spreads=(0.05, 1.0, 12.0),
        weighted=True,
    )
}


def check_training(values):
    assert sum(values("actor/pg_clipfrac")) > 0


E20 = math.exp(20)
E25 = math.exp(25)

test_by_hand = make_test_of_rows(
    {
        "both bounds and the dual clip": HandRow(
            method=Grpo(clip_low=0.8, clip_high=1.25, dual_clip=3.0),
            ratio=(0.5, 0.5, 0.8, 1.0, 1.25, 1.5, 1.5, 3.0, 3.5, 3.5, 3.5),
            advantages=(2.0, -2.0, -1.0, -1.0, 1.0, 2.0, -2.0, -1.0, -2.0, 2.0, 0.0),
            weight=(0.5, 0.0, 0.8, 1.0, 1.25, 0.0, 1.5, 3.0, 0.0, 0.0, 3.5),
            value=(-1.0, 1.6, 0.8, 1.0, -1.25, -2.5, 3.0, 3.0, 6.0, -2.5, 0.0),
        ),
        "no dual clip": HandRow(
            method=Grpo(dual_clip=None), ratio=(100.0,), advantages=-1.0, weight=(100.0,), value=(100.0,)
        ),
        "beyond the clamp there is value but no gradient": HandRow(
            method=Grpo(dual_clip=None), ratio=(E25, 1 / E25), advantages=(-1.0, 1.0), weight=0.0, value=(E20, -1 / E20)
        ),
        "bounds as a number and a tensor": HandRow(
            method=Grpo(),
            ratio=(1.3, 1.3),
            advantages=1.0,
            weight=(0.0, 1.3),
            value=(-1.1, -1.3),
            bounds=Bounds(0.8, row(1.1, 1.5)),
        ),
        # ACPO's epsilon can exceed 1.
        **{
            f"a lower bound of {low} never clips": HandRow(
                method=Grpo(dual_clip=None, log_ratio_clamp=None),
                ratio=(1e-9, 1e9),
                advantages=(-1.0, 1.0),
                weight=(1e-9, 1e9),
                value=(1e-9, -1e9),
                bounds=Bounds(low, math.inf),
            )
            for low in (0.0, -2.0)
        },
    }
)
