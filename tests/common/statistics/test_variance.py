"""Squared errors of means, clustered or not: values by hand. Not covered: intervals (test_comparison.py,
tests/papers/evaluation/test_estimators.py).
"""

import numpy as np
import pytest

from tests.messages import assert_names
from verl_clipx.common.statistics.variance import compute_squared_error, count_effective_units, explain_missing_interval


def test_values_that_are_no_clusters_or_each_one_of_its_own():
    # Variance 0.3 of 5 values.
    values = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    assert compute_squared_error(values) == pytest.approx(0.06)
    assert compute_squared_error(values, np.arange(5)) == pytest.approx(0.06)


def test_clusters_of_equal_size_by_hand():
    # Mean 0.5; deviations of the clusters add up to 1, -1, 0; (1 + 1 + 0) / 36, times 3 / 2.
    values = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    clusters = np.array(["a", "a", "b", "b", "c", "c"])
    assert count_effective_units(6, clusters) == pytest.approx(3.0)
    assert compute_squared_error(values, clusters) == pytest.approx(2 / 36 * 3 / 2)
    # Miller's formula, the factor 3 / 2 aside: the variance over 6 with ddof 0, and the products within clusters.
    deviations = values - 0.5
    products = deviations[0] * deviations[1] + deviations[2] * deviations[3] + deviations[4] * deviations[5]
    assert compute_squared_error(values, clusters) * 2 / 3 == pytest.approx(values.var() / 6 + 2 * products / 36)


def test_a_large_cluster_counts_for_little():
    # As 16 / (3^2 + 1^2) clusters of equal size; deviations of the clusters +-0.75 with the mean 0.25.
    values = np.array([0.0, 0.0, 0.0, 1.0])
    clusters = np.array([0, 0, 0, 1])
    assert count_effective_units(4, clusters) == pytest.approx(1.6)
    assert compute_squared_error(values, clusters) == pytest.approx(1.6 / 0.6 * 2 * 0.75**2 / 16)


def test_one_question_is_too_few():
    assert_names(explain_missing_interval(1, None), "1 question", "needs 2")
    assert explain_missing_interval(2, None) is None


def test_two_clusters_are_too_few():
    assert_names(explain_missing_interval(10, np.arange(10) % 2), "2.0 of equal size", "over clusters", "needs 5")
    assert explain_missing_interval(10, np.arange(10) % 5) is None
