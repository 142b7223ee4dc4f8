"""GPPO's weight by hand; the paper's formula is in the golden vectors."""

import math

from tests.golden.settings import EPSILONS, UNCLAMPED, Setup
from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.gppo import Gppo

from .hand_rows import HandRow, make_test_of_rows, row

PUBLISHED = {"gppo": dict(clip_low=0.8, clip_high=1.2)}
GOLDEN = {"paper_gppo": Setup("gppo", EPSILONS, UNCLAMPED)}
GPPO = Gppo(clip_low=0.8, clip_high=1.25)

test_by_hand = make_test_of_rows(
    {
        "A of every sign": HandRow(
            method=GPPO,
            ratio=(0.5, 0.5, 0.8, 1.0, 1.25, 2.0, 2.0, 2.0),
            advantages=(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0),
            weight=(0.8, 0.5, 0.8, 1.0, 1.25, 1.25, 2.0, 2.0),
        ),
        "beyond the clamp only the bounds keep a gradient": HandRow(
            method=GPPO,
            ratio=(math.exp(25), math.exp(25), math.exp(-25), math.exp(-25)),
            advantages=(1.0, -1.0, 1.0, -1.0),
            weight=(1.25, 0.0, 0.0, 0.8),
        ),
        "bounds of each token": HandRow(
            method=GPPO,
            ratio=(0.7, 0.7),
            advantages=-1.0,
            weight=(0.9, 0.7),
            bounds=Bounds(row(0.9, 0.5), row(1.5, 1.5)),
        ),
    }
)
