"""ASPO's weight by hand, for its authors' reading and for the one that DGPO's rows train."""

import math

from tests.golden.settings import EPSILONS, UNCLAMPED, Setup, above, below
from verl_clipx.losses.methods.aspo import Aspo

from .hand_rows import HandRow, make_test_of_rows

CLIP = dict(clip_low=0.8, clip_high=1.2)
PUBLISHED = {
    "aspo": dict(flip="positive", weight_low=None, weight_high=3.0, negative_weight_high=3.0, **CLIP),
    "aspo_dgpo": dict(flip="both", weight_low=0.67, weight_high=4.0, negative_weight_high=None, **CLIP),
}
CAPS = {**EPSILONS, "weight_low": ("e_lo", below), "weight_high": ("e_hi", above)}
GOLDEN = {
    # Not Eq. 6 of DGPO's paper as printed: the vectors share the group's reading of it, 1/ratio clamped to the caps.
    # They are a second opinion on the arithmetic, not on the reading.
    "paper_aspo": Setup("aspo_dgpo", CAPS, UNCLAMPED),
    # The same bounds on 1/ratio with the flip of the authors' code, whose own cap is 3 for both signs.
    "paper_aspo_posonly": Setup("aspo", CAPS, ("clipx.negative_weight_high=null", *UNCLAMPED)),
}
BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}
SIGNS = (*[1.0] * 4, *[-1.0] * 4)
FAR = (math.exp(-25), math.exp(25))

test_by_hand = make_test_of_rows(
    {
        "the authors' reading": HandRow(
            method=Aspo(**BOUNDS),
            ratio=(0.25, 0.5, 1.25, 2.0, 0.5, 0.8, 2.0, 4.0),
            advantages=SIGNS,
            weight=(3.0, 2.0, 0.8, 0.0, 0.0, 0.8, 2.0, 3.0),
        ),
        # The caps of its Table 1: 1 + 3 where the ratio is small and A > 0, 1 - 0.33 where it is large and A < 0. Eq. 6
        # prints them the other way round.
        "that of DGPO's rows": HandRow(
            method=Aspo(flip="both", weight_low=0.67, weight_high=4.0, **BOUNDS),
            ratio=(0.125, 0.5, 1.25, 2.0, 0.5, 0.8, 1.0, 4.0),
            advantages=SIGNS,
            weight=(4.0, 2.0, 0.8, 0.0, 0.0, 1.25, 1.0, 0.67),
        ),
        "no caps": HandRow(
            method=Aspo(weight_high=None, negative_weight_high=None),
            ratio=(0.01, 100.0),
            advantages=(1.0, -1.0),
            weight=(100.0, 100.0),
        ),
        "a capped token keeps its gradient beyond the clamp": HandRow(
            method=Aspo(), ratio=FAR, advantages=(1.0, -1.0), weight=(3.0, 3.0)
        ),
        "an uncapped one does not": HandRow(
            method=Aspo(negative_weight_high=None), ratio=FAR, advantages=(1.0, -1.0), weight=(3.0, 0.0)
        ),
    }
)
