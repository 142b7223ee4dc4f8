"""The paired bootstrap: values by hand, exact enumeration of resamples, coverage, pairing.

Not covered: reading two runs (test_run.py).
"""

import itertools

import numpy as np
import pytest

from verl_clipx.evaluation.comparison import paired_bootstrap


def test_equal_runs_do_not_differ():
    result = paired_bootstrap([0.0, 1.0, 0.5], [0.0, 1.0, 0.5])
    assert (result.difference, result.low, result.high, result.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert (result.wins, result.losses, result.ties) == (0, 0, 3)


def test_one_question_shows_nothing():
    result = paired_bootstrap([0.0], [1.0])
    assert (result.difference, result.wins, result.p_value) == (1.0, 1, 1.0)


def test_means_and_counts_by_hand():
    result = paired_bootstrap([0.0, 1.0, 0.5, 0.25], [1.0, 0.5, 0.5, 0.5])
    assert (result.first, result.second, result.difference) == (0.4375, 0.625, 0.1875)
    assert (result.wins, result.losses, result.ties) == (2, 1, 1)


def test_quantiles_and_p_value_agree_with_all_resamples():
    # 5 questions have 5^5 resamples: the bootstrap distribution is known exactly.
    differences = np.array([0.9, -0.2, 0.4, 0.1, -0.3])
    exact = np.array([differences[list(rows)].mean() for rows in itertools.product(range(5), repeat=5)])
    result = paired_bootstrap(np.zeros(5), differences, resamples=40_000, seed=1)
    assert result.low == pytest.approx(np.quantile(exact, 0.025), abs=0.02)
    assert result.high == pytest.approx(np.quantile(exact, 0.975), abs=0.02)
    assert result.p_value == pytest.approx(2 * (exact <= 0).mean(), abs=0.01)


def test_swapping_the_runs_flips_the_sign():
    generator = np.random.default_rng(0)
    first, second = generator.random(20), generator.random(20)
    there, back = paired_bootstrap(first, second), paired_bootstrap(second, first)
    assert (back.difference, back.wins, back.p_value) == (-there.difference, there.losses, there.p_value)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-12)


def test_pairing_finds_what_the_difficulty_of_questions_hides():
    generator = np.random.default_rng(0)
    first = generator.random(60)
    paired = paired_bootstrap(first, first + 0.05 + 0.01 * generator.standard_normal(60))
    shuffled = paired_bootstrap(first, generator.permutation(first + 0.05))
    assert 0 < paired.low < paired.high < 0.1 and paired.p_value < 0.001
    assert shuffled.low < 0 < shuffled.high and shuffled.p_value > 0.05


def test_the_interval_holds_the_difference_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        first = generator.random(50)
        second = first + generator.normal(0.1, 0.3, 50)
        result = paired_bootstrap(first, second, resamples=500)
        held += result.low <= 0.1 <= result.high
    assert 0.90 <= held / 400 <= 0.975


def test_the_seed_decides():
    values = np.random.default_rng(0).random(30)
    assert paired_bootstrap(np.zeros(30), values, seed=3) == paired_bootstrap(np.zeros(30), values, seed=3)
    assert paired_bootstrap(np.zeros(30), values, seed=3) != paired_bootstrap(np.zeros(30), values, seed=4)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 0.0]), ([[1.0]], [[1.0]])])
def test_runs_on_other_questions_are_refused(first, second):
    with pytest.raises(ValueError, match="of both runs"):
        paired_bootstrap(first, second)
