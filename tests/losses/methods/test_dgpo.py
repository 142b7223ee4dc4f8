"""DGPO's weight by hand, with ratios beyond the clamp and GPPO's constant at m = 1. Not covered: the ends of n and m
(tests/claims/test_parameters.py).
"""

import math

from tests.golden.settings import EPSILONS, Setup
from verl_clipx.losses.methods.dgpo import Dgpo

from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {
    "dgpo": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=None),
    "dgpo_reference": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=20.0),
}
KEYS = EPSILONS | {"n": "n", "m": "m"}
GOLDEN = {"dgpo": Setup("dgpo_reference", KEYS), "paper_dgpo": Setup("dgpo", KEYS)}
# A lower end that is refused: with this all lower ends train.
ALL_AT_AN_END = {0: {"clip_low": 1e-6}}
NEVER_VALID = (("clip_low", None), ("clip_high", None), ("clip_low", 0))
BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}
E25 = math.exp(25)

test_by_hand = make_test_of_rows(
    {
        # LN: 0.4^2 / 0.8 = 0.2; HP: sqrt(1.25 * 5) = 2.5.
        "n = 1, m = 2": HandRow(
            method=Dgpo(n=1, m=2, **BOUNDS),
            ratio=(0.4, 0.4, 0.8, 1.0, 1.25, 5.0, 5.0),
            advantages=(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0),
            weight=(0.2, 0.4, 0.8, 1.0, 1.25, 2.5, 5.0),
        ),
        # LN: 0.4^3 / 0.8^2 = 0.1; HP: 1.25^(1/3) * 10^(2/3) = 125^(1/3).
        "n = 2, m = 3": HandRow(
            method=Dgpo(n=2, m=3, **BOUNDS), ratio=(0.4, 10.0), advantages=(-1.0, 1.0), weight=(0.1, 5.0)
        ),
        "m = 1 is GPPO's constant": HandRow(
            method=Dgpo(m=1, **BOUNDS), ratio=(1.25, 5.0, 1e30), advantages=1.0, weight=(1.25, 1.25, 1.25)
        ),
        "power laws are not cut off by the clamp but the ratio is": HandRow(
            method=Dgpo(n=1, m=2, log_ratio_clamp=20.0),
            ratio=(1 / E25, 1 / E25, E25, E25),
            advantages=(-1.0, 1.0, 1.0, -1.0),
            weight=(E25**-2 / 0.8, 0.0, math.sqrt(1.2 * E25), 0.0),
        ),
    }
)
