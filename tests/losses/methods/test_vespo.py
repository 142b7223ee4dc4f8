"""VESPO's weight of a sequence's ratio by hand, and its range; tests/training/worker/test_golden.py has TRL's numbers.
Not covered: TRL's truncated correction inside the sequence's ratio, which this plugin leaves to verl's correction.
"""

import math

from tests.golden.settings import Setup
from verl_clipx.losses.methods.vespo import Vespo

from .at import At, by_hand

PUBLISHED = {"vespo": dict(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)}
VARIANTS = ({"k_positive": 1.0, "lambda_negative": 5.0},)
KEYS = dict(k_positive="k_pos", lambda_positive="lambda_pos", k_negative="k_neg", lambda_negative="lambda_neg")
GOLDEN = {"trl_vespo": Setup("vespo", KEYS)}
# Sequences with w = 1, 2 and 0.5.
RATIO = ((0.5, 2.0), (1.0, 2.0), (0.25, 2.0))


def weights(k, decay):
    return tuple((w**k * math.exp(decay * (1 - w)),) * 2 for w in (1.0, 2.0, 0.5))


test_by_hand = by_hand(
    {
        **{f"A = {A}": At(Vespo(), RATIO, A, weights(*by)) for A, by in ((1.0, (2, 3)), (0.0, (2, 3)), (-1.0, (3, 2)))},
        "masked tokens are no part of the product": At(Vespo(), (1.0, 50.0), 1.0, (1.0, math.nan), mask=(True, False)),
        "the least ratio of a sequence": At(Vespo(), (1e-6, 1e-6), 1.0, (1e-16 * math.exp(3 - 3e-8),) * 2),
        # exp(20) inside the exponent: no weight is left, and none overflows.
        "the largest": At(Vespo(), (1e6, 1e6), -1.0, 0.0),
    }
)
