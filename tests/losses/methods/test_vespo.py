"""VESPO's weight of a sequence's ratio by hand, and its range; tests/training/worker/test_golden.py has TRL's numbers.
Not covered: TRL's truncated correction inside the sequence's ratio, which this plugin leaves to verl's correction.
"""

import math

from tests.golden.settings import Setup
from verl_clipx.losses.methods.vespo import Vespo

from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"vespo": dict(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)}
VARIANTS = ({"k_positive": 1.0, "lambda_negative": 5.0},)
KEYS = dict(k_positive="k_pos", lambda_positive="lambda_pos", k_negative="k_neg", lambda_negative="lambda_neg")
GOLDEN = {"trl_vespo": Setup("vespo", KEYS)}
# Sequences with w = 1, 2 and 0.5.
RATIO = ((0.5, 2.0), (1.0, 2.0), (0.25, 2.0))


def weights(k, decay):
    return tuple((w**k * math.exp(decay * (1 - w)),) * 2 for w in (1.0, 2.0, 0.5))


test_by_hand = make_test_of_rows(
    {
        **{
            f"A = {A}": HandRow(method=Vespo(), ratio=RATIO, advantages=A, weight=weights(*by))
            for A, by in ((1.0, (2, 3)), (0.0, (2, 3)), (-1.0, (3, 2)))
        },
        "masked tokens are no part of the product": HandRow(
            method=Vespo(), ratio=(1.0, 50.0), advantages=1.0, weight=(1.0, math.nan), mask=(True, False)
        ),
        "the least ratio of a sequence": HandRow(
            method=Vespo(), ratio=(1e-6, 1e-6), advantages=1.0, weight=(1e-16 * math.exp(3 - 3e-8),) * 2
        ),
        # exp(20) inside the exponent: no weight is left, and none overflows.
        "the largest": HandRow(method=Vespo(), ratio=(1e6, 1e6), advantages=-1.0, weight=0.0),
    }
)
