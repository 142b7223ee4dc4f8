"""Means and shares with their intervals: by hand, and where there is none. Not covered: clusters (test_variance.py),
two methods (test_comparison.py).
"""

import math

import pytest
from scipy import stats

from verl_clipx.common.statistics.estimate import Estimate, estimate, estimate_over_seeds, estimate_share


def test_the_interval_by_hand():
    # Values 0, 1, 1, 0, 1: mean 0.6, standard deviation sqrt(0.3), t(0.975, 4) = 2.776445.
    found = estimate([0, 1, 1, 0, 1])
    half = 2.776445105 * math.sqrt(0.3 / 5)
    assert (found.mean, found.low, found.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half), abs=1e-9)
    assert str(found) == "0.600 [-0.080, 1.280]"


def test_values_that_do_not_vary_have_no_interval_and_none_but_finite_ones_have_a_mean():
    for values in ([0.25], [0.5, 0.5], [0.1] * 3, [0.0] * 9, [1e6 / 3] * 7):
        found = estimate(values)
        assert found == Estimate(found.mean) and found.mean == pytest.approx(values[0])
    assert str(Estimate(0.25)) == "0.250 (no interval)"
    for values in ([], [[1.0, 0.0]], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="finite values in one dimension"):
            estimate(values)


def test_over_seeds_it_takes_three():
    # Mean 2, standard deviation 1, standard error 1 / sqrt(3), t(0.975, 2) = 4.302653.
    found = estimate_over_seeds([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert [estimate_over_seeds(values) for values in ([0.4], [0.4, 0.6])] == [Estimate(0.4), Estimate(0.5)]
    with pytest.raises(ValueError, match="at least one"):
        estimate_over_seeds([])


def test_the_exact_interval_of_a_share():
    # None of three: the largest share p with (1 - p)^3 = 0.025.
    none, every = estimate_share(0, 3), estimate_share(3, 3)
    assert (none.mean, none.low, none.high) == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 3)))
    assert (every.low, every.high) == pytest.approx((0.025 ** (1 / 3), 1.0))
    exact = stats.binomtest(2, 10).proportion_ci(method="exact")
    assert estimate_share(2, 10) == Estimate(0.2, *map(pytest.approx, exact))
