"""GSPO's weight and value by hand, and the settings of verl's own gspo; LUSPO, its sum over a sequence's tokens, is in
test_against_polgrad.py. Not covered: splits inside a sequence, which verl does not make for a loss.
"""

import math

from verl_clipx.losses.methods.gspo import Gspo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"gspo": dict(clip_low=0.9997, clip_high=1.0004, log_ratio_clamp=10.0)}
VARIANTS = ({"clip_low": None, "clip_high": None, "log_ratio_clamp": None},)


def check_training(values):
    assert sum(values("actor/pg_clipfrac")) > 0


def move_a_sequence_beyond_the_clamp(batch):
    batch["log_prob"][0, :] = batch["old_log_prob"][0, :] + 12


VERL_OVERRIDES = ("policy_loss.loss_mode=gspo", "clip_ratio_low=3e-4", "clip_ratio_high=4e-4")
SAME_IN_VERL = {
    # Sequences inside and outside the bounds, and well outside.
    "gspo": SameInVerl(overrides=("+clipx=gspo",), verl_overrides=VERL_OVERRIDES, spreads=(4e-3, 0.5)),
    # verl's metric of the log-ratio clamps no token, ours at 10.
    "gspo beyond its clamp": SameInVerl(
        overrides=("+clipx=gspo",),
        verl_overrides=VERL_OVERRIDES,
        metrics=("pg_clipfrac",),
        spreads=(30.0,),
        change_batch=move_a_sequence_beyond_the_clamp,
    ),
}
WIDE = Gspo(clip_low=0.8, clip_high=1.25 + 1e-12)
WITHOUT_BOUNDS = Gspo(clip_low=None, clip_high=None)
# Log-ratios of 30 and -20 have a mean of 5, within the clamp of 10; those of 30 and -8 one of 11, beyond it.
WITHIN_CLAMP = (math.exp(30), math.exp(-20))
BEYOND_CLAMP = (math.exp(30), math.exp(-8))
BESIDE_THE_PAPERS_BOUNDS = ((0.9996,), (0.9998,), (1.0003,), (1.0005,))

test_by_hand = make_test_of_rows(
    {
        # The geometric mean of 4 and 1/4 is 1, far as both tokens are from it.
        "A > 0": HandRow(
            method=WIDE,
            ratio=((4.0, 0.25), (4.0, 1.0), (0.25, 1.0), (1.25, 1.25)),
            advantages=1.0,
            weight=((1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (1.25, 1.25)),
            value=((-1.0, -1.0), (-1.25 - 1e-12,) * 2, (-0.5, -0.5), (-1.25, -1.25)),
        ),
        "A < 0": HandRow(
            method=WIDE,
            ratio=((4.0, 1.0), (0.25, 1.0)),
            advantages=-2.0,
            weight=((2.0, 2.0), (0.0, 0.0)),
            value=((4.0, 4.0), (1.6, 1.6)),
        ),
        "A = 0": HandRow(method=WIDE, ratio=(0.25, 1.0), advantages=0.0, weight=0.5, value=0.0),
        "the paper's lower bound": HandRow(
            method=Gspo(),
            ratio=BESIDE_THE_PAPERS_BOUNDS,
            advantages=-1.0,
            weight=((0.0,), (0.9998,), (1.0003,), (1.0005,)),
        ),
        "the paper's upper bound": HandRow(
            method=Gspo(),
            ratio=BESIDE_THE_PAPERS_BOUNDS,
            advantages=1.0,
            weight=((0.9996,), (0.9998,), (1.0003,), (0.0,)),
        ),
        "tokens outside the mask": HandRow(
            method=WIDE, ratio=(4.0, 1.0, 1.0), advantages=-1.0, weight=(2.0, 2.0, math.nan), mask=(True, True, False)
        ),
        "a token is not clamped": HandRow(
            method=WITHOUT_BOUNDS, ratio=WITHIN_CLAMP, advantages=-1.0, weight=math.exp(5)
        ),
        "a sequence is": HandRow(
            method=WITHOUT_BOUNDS, ratio=BEYOND_CLAMP, advantages=-1.0, weight=0.0, value=math.exp(10)
        ),
        "without the clamp": HandRow(
            method=Gspo(clip_low=None, clip_high=None, log_ratio_clamp=None),
            ratio=BEYOND_CLAMP,
            advantages=-1.0,
            weight=math.exp(11),
        ),
        "there is none below": HandRow(
            method=WITHOUT_BOUNDS, ratio=(math.exp(-15), math.exp(-15)), advantages=1.0, weight=math.exp(-15)
        ),
    }
)
