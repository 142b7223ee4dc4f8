"""Fixed bounds: nothing observed, nothing decided. Does not cover the weights that use them."""

import math

from tests.losses.methods.at import row, tokens_at
from verl_clipx.losses.methods import Bounds, FixedBounds


def test_bounds_are_as_given_and_no_bound_is_one_that_no_ratio_reaches():
    for low, high, expected in ((0.8, 1.28, (0.8, 1.28)), (None, None, (0.0, math.inf))):
        method, t = FixedBounds(clip_low=low, clip_high=high), tokens_at(row(1.0), row(1.0))
        statistics = method.statistics(t)
        decision = method.decide(statistics)
        assert method.statistics_size == len(statistics) == len(decision) == 0
        assert method.bounds(t, decision) == expected and method.metrics(statistics, decision) == {}
    assert Bounds(0.8, row(1.1, 1.2, 1.3)).clip(row(0.5, 1.2, 9.0)).tolist() == [[0.8, 1.2, 1.3]]
