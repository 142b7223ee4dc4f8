"""Squared errors of means, clustered or not, and the split into question, seed and sample: values by hand, identities,
recovery of known parts.

Not covered: intervals (test_comparison.py, tests/papers/evaluation/test_estimators.py).
"""

import numpy as np
import pytest

from verl_clipx.common.statistics.variance import effective_units, split_variance, squared_error, too_few_units


def test_clusters_of_one_size_by_hand():
    # Variance 0.3 of 5 values that are no clusters, or each one of its own.
    alone = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    assert squared_error(alone) == pytest.approx(0.06) == squared_error(alone, np.arange(5))
    # Mean 0.5; deviations of the clusters add up to 1, -1, 0; (1 + 1 + 0) / 36, times 3 / 2.
    values = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    clusters = np.array(["a", "a", "b", "b", "c", "c"])
    assert effective_units(6, clusters) == pytest.approx(3.0)
    assert squared_error(values, clusters) == pytest.approx(2 / 36 * 3 / 2)
    # Miller's formula, the factor 3 / 2 aside: the variance over 6 with ddof 0, and the products within clusters.
    deviations = values - 0.5
    within = 2 * (deviations[0] * deviations[1] + deviations[2] * deviations[3] + deviations[4] * deviations[5])
    assert squared_error(values, clusters) * 2 / 3 == pytest.approx(values.var() / 6 + within / 36)


def test_a_large_cluster_counts_for_little():
    # 16 / (3^2 + 1^2) clusters of equal size; deviations of the clusters +-0.75 with the mean 0.25.
    clusters = np.array([0, 0, 0, 1])
    assert effective_units(4, clusters) == pytest.approx(1.6)
    values = np.array([0.0, 0.0, 0.0, 1.0])
    assert squared_error(values, clusters) == pytest.approx(1.6 / 0.6 * 2 * 0.75**2 / 16)


def test_with_independent_questions_unequal_clusters_are_unbiased():
    generator = np.random.default_rng(0)
    clusters = np.repeat([0, 1, 2, 3], [12, 2, 5, 1])
    found = squared_error(generator.standard_normal((20_000, 20)), clusters)
    # The truth is 1 / 20; the mean's own standard error is below 1 %.
    assert found.mean() == pytest.approx(1 / 20, rel=0.03)


def test_too_few_questions_or_clusters_say_so():
    assert too_few_units(2, None) is None and "1 question; an interval needs 2" in too_few_units(1, None)
    assert too_few_units(10, np.arange(10) % 5) is None
    assert "count like 2.0 of equal size; an interval over clusters needs 5" in too_few_units(10, np.arange(10) % 2)


def test_the_split_by_hand():
    # Two trainings, two questions, 2 samples behind each share. Means of rows 0.5 and 0.75, of columns 0.75 and 0.5.
    values = np.array([[0.5, 0.5], [1.0, 0.5]])
    found = split_variance(values, samples=2)
    # Residuals +-0.125 four times, over 1 degree of freedom: 0.0625.
    # Samples: three shares of 0.5 and one of 1: 0.75 / 4 * 2.
    assert found.sample == pytest.approx(0.375)
    # Columns: variance 0.03125, less half the residual: 0. Rows the same.
    assert (found.question, found.seed) == (pytest.approx(0.0), pytest.approx(0.0))
    # 0.0625 - 0.375 / 2 is negative.
    assert found.interaction == 0.0


def test_the_split_of_one_training_by_hand():
    # Variance over questions 1 / 3; of which 0.25 / 2 * 2 / 1 / 2 is sampling.
    found = split_variance(np.array([[0.0, 1.0, 0.5, 0.5]]), samples=2)
    assert found.sample == pytest.approx(0.25)
    assert found.question == pytest.approx(1 / 6 - 0.125)
    assert (found.seed, found.interaction) == (None, None)


@pytest.mark.parametrize("samples", [1, None])
def test_one_sample_leaves_sampling_in_the_interaction(samples):
    values = np.random.default_rng(0).integers(0, 2, (3, 50)).astype(float)
    found = split_variance(values, samples)
    assert found.sample is None and found.interaction > 0.1
    assert found.of_mean(50, 3, 1)["interaction"] == pytest.approx(found.interaction / 150)


def test_the_split_finds_the_parts_that_the_scores_were_made_of():
    generator = np.random.default_rng(1)
    seeds, questions, samples = 400, 400, 4
    chance = 0.5 + 0.15 * generator.choice([-1, 1], (1, questions)) + 0.1 * generator.choice([-1, 1], (seeds, 1))
    chance = chance + 0.05 * generator.choice([-1, 1], (seeds, questions))
    found = split_variance(generator.binomial(samples, chance) / samples, samples)
    assert found.question == pytest.approx(0.15**2, rel=0.05)
    assert found.seed == pytest.approx(0.1**2, rel=0.05)
    assert found.interaction == pytest.approx(0.05**2, rel=0.15)
    assert found.sample == pytest.approx((chance * (1 - chance)).mean(), rel=0.01)
    parts = found.of_mean(questions, seeds, samples)
    assert parts["sample"] == pytest.approx(found.sample / (400 * 400 * 4)) and parts["seed"] == found.seed / 400


def test_one_question_has_no_split():
    with pytest.raises(ValueError, match="at least 2 questions"):
        split_variance(np.array([[0.5]]), 2)
