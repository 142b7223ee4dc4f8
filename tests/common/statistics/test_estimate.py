"""Means and shares with their intervals: by hand, and where there is none. Not covered: clusters (test_variance.py),
two methods (test_comparison.py).
"""

import math

import pytest
from scipy import stats

from verl_clipx.common.statistics.estimate import Estimate, estimate, estimate_over_seeds, estimate_share


def test_the_interval_by_hand():
    # Values 0, 1, 1, 0, 1: mean 0.6, standard deviation sqrt(0.3), t(0.975, 4) = 2.776445.
    result = estimate([0, 1, 1, 0, 1])
    half_width = 2.776445105 * math.sqrt(0.3 / 5)
    assert result.mean == pytest.approx(0.6, abs=1e-9)
    assert result.low == pytest.approx(0.6 - half_width, abs=1e-9)
    assert result.high == pytest.approx(0.6 + half_width, abs=1e-9)
    assert str(result) == "0.600 [-0.080, 1.280]"


@pytest.mark.parametrize("values", [[0.25], [0.5, 0.5], [0.1] * 3, [0.0] * 9, [1e6 / 3] * 7])
def test_values_that_do_not_vary_have_no_interval(values):
    result = estimate(values)
    assert result.mean == pytest.approx(values[0])
    assert result == Estimate(result.mean)


def test_an_estimate_without_an_interval_says_so():
    assert str(Estimate(0.25)) == "0.250 (no interval)"


@pytest.mark.parametrize("values", [[], [[1.0, 0.0]], [float("nan"), 1.0]])
def test_what_is_not_a_list_of_finite_values_is_refused(values):
    with pytest.raises(ValueError, match="finite values in one dimension"):
        estimate(values)


def test_an_interval_over_seeds_takes_three():
    # Mean 2, standard deviation 1, standard error 1 / sqrt(3), t(0.975, 2) = 4.302653.
    result = estimate_over_seeds([1.0, 2.0, 3.0])
    assert result.low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-6)
    assert result.high == pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-6)
    assert estimate_over_seeds([0.4]) == Estimate(0.4)
    assert estimate_over_seeds([0.4, 0.6]) == Estimate(0.5)


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        estimate_over_seeds([])


def test_the_exact_interval_of_none_and_of_all():
    # None of three: the largest share p with (1 - p)^3 = 0.025.
    none_of_three = estimate_share(0, 3)
    assert none_of_three.mean == 0.0
    assert none_of_three.low == pytest.approx(0.0)
    assert none_of_three.high == pytest.approx(1 - 0.025 ** (1 / 3))
    all_of_three = estimate_share(3, 3)
    assert all_of_three.low == pytest.approx(0.025 ** (1 / 3))
    assert all_of_three.high == pytest.approx(1.0)


def test_the_exact_interval_of_a_share_is_scipy_s():
    expected = stats.binomtest(2, 10).proportion_ci(method="exact")
    result = estimate_share(2, 10)
    assert result.mean == 0.2
    assert result.low == pytest.approx(expected.low)
    assert result.high == pytest.approx(expected.high)
