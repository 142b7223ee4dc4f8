"""Double-sided importance sampling by hand: inside, at and outside each bound, for both signs and for A = 0;
tests/training/worker/test_golden.py has SkyRL's own numbers. Not covered: which policy the ratio is measured from.
"""

import math

from tests.golden.settings import Setup, bounds
from verl_clipx.losses.methods.two_sided import TwoSided

from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"two_sided": dict(clip_low=0.8, clip_high=1.2)}
VARIANTS = ({"clip_low": None, "clip_high": None},)
GOLDEN = {"skyrl_rollout_is": Setup("two_sided", bounds("eps_clip_low", "eps_clip_high"))}
RATIO = (0.5, 0.8, 1.0, 1.2, 1.5)

test_whatever_is_outside_is_dropped = make_test_of_rows(
    {
        **{
            f"A = {A}": HandRow(method=TwoSided(), ratio=RATIO, advantages=A, weight=(0.0, 0.8, 1.0, 1.2, 0.0))
            for A in (1.0, -1.0, 0.0)
        },
        "no lower bound": HandRow(
            method=TwoSided(clip_low=None), ratio=RATIO, advantages=-1.0, weight=(0.5, 0.8, 1.0, 1.2, 0.0)
        ),
        "no upper bound": HandRow(
            method=TwoSided(clip_high=None), ratio=RATIO, advantages=-1.0, weight=(0.0, 0.8, 1.0, 1.2, 1.5)
        ),
        "no bounds": HandRow(
            method=TwoSided(clip_low=None, clip_high=None), ratio=RATIO, advantages=-1.0, weight=RATIO
        ),
        "the value is the weighted log-probability": HandRow(
            method=TwoSided(),
            ratio=(1.1, 2.0),
            advantages=3.0,
            weight=(1.1, 0.0),
            value=(-1.1 * 3 * math.log(0.55), 0.0),
            old=(0.5, 0.25),
        ),
    }
)
