"""Fixed bounds: nothing observed, nothing decided. Does not cover the weights that use them."""

import math

import pytest

from tests.methods.at import row, tokens_at
from verl_clipx.methods import Bounds, FixedBounds


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.8, 1.28, (0.8, 1.28)),
        (None, 1.2, (0.0, 1.2)),
        (0.8, None, (0.8, math.inf)),
        (None, None, (0.0, math.inf)),
    ],
)
def test_bounds_are_as_given_and_no_bound_is_one_that_no_ratio_reaches(low, high, expected):
    method, t = FixedBounds(clip_low=low, clip_high=high), tokens_at(row(1.0), row(1.0))
    statistics = method.statistics(t)
    decision = method.decide(statistics)
    assert method.statistics_size == len(statistics) == len(decision) == 0
    assert method.bounds(t, decision) == expected
    assert method.metrics(statistics, decision) == {}


def test_a_ratio_within_bounds():
    assert Bounds(0.8, row(1.1, 1.2, 1.3)).clip(row(0.5, 1.2, 9.0)).tolist() == [[0.8, 1.2, 1.3]]
