"""One inference over seeds and questions: values by hand, what is refused, the coverage of the 95 % interval. Not
covered: reading evaluations (tests/papers/evaluation/test_comparison.py), tables (tests/papers/tables).
"""

import numpy as np
import pytest
from scipy import stats

from verl_clipx.common.statistics.comparison import (
    ALIKE,
    HIGHER,
    LOWER,
    QUESTIONS,
    SEEDS,
    SEEDS_AND_QUESTIONS,
    compare,
    compare_means,
    compare_shares,
    correct_family,
    holm,
)

# Mean 0.5 and 0.7 over seeds; over questions the difference is 0.1, 0.2, 0.3.
FIRST = np.array([[0.4, 0.5, 0.3], [0.5, 0.6, 0.4], [0.6, 0.7, 0.5]])
SECOND = np.array([[0.5, 0.6, 0.7], [0.6, 0.9, 0.6], [0.7, 0.9, 0.8]])


def test_three_seeds_by_hand():
    found = compare({"b": FIRST}, {"b": SECOND})
    assert (found.first, found.second) == (pytest.approx(0.5), pytest.approx(0.7))
    assert found.difference == pytest.approx(0.2) and (found.wins, found.losses, found.ties) == (3, 0, 0)
    # Differences by question 0.1, 0.2, 0.3: variance 0.01 over 3 questions.
    question = 0.01 / 3
    assert found.error["question"] == pytest.approx(question)
    # Seed means 0.4, 0.5, 0.6, and 0.6, 0.7, 0.8: variances 0.01 over 3 seeds each.
    between = [0.01 / 3, 0.01 / 3]
    # FIRST has no residuals. SECOND's, with rows 0.6, 0.7, 0.8 and columns 0.6, 0.8, 0.7: 0, -0.1, 0.1; 0, 0.1, -0.1;
    # 0, 0, 0. Sums of squares 0.02, 0.02, 0, each over 3 - 1 and 3 questions, added up over 3 * 2.
    explained = 0.04 / (2 * 3) / (3 * 2)
    assert found.error["seed"] == pytest.approx(sum(between) - explained)
    variance = question + sum(between) - explained
    freedom = variance**2 / (question**2 / 2 + between[0] ** 2 / 2 + between[1] ** 2 / 2)
    half = stats.t.ppf(0.975, freedom) * variance**0.5
    assert (found.low, found.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert found.p_value == pytest.approx(2 * stats.t.sf(0.2 / variance**0.5, freedom))
    assert (found.over, found.seeds, found.refused) == (SEEDS_AND_QUESTIONS, (3, 3), None)


def test_two_checkpoints_or_seeds_that_say_less_than_noise_get_the_paired_interval_over_questions():
    generator = np.random.default_rng(0)
    first, second = generator.random((1, 20)), generator.random((1, 20))
    checkpoints = compare({"b": first}, {"b": second})
    why = "1 and 1 training seeds are too few: to say whether a method is better, 3 of each are needed"
    assert (checkpoints.over, checkpoints.refused) == (QUESTIONS, why)
    # Seed means 0.5, 0.51, 0.5: far less between them than the residuals make.
    noisy = np.array([[0.0, 1.0, 0.5, 0.5], [1.0, 0.0, 0.5, 0.54], [0.5, 0.5, 0.0, 1.0]])
    seeds = compare({"b": noisy}, {"b": noisy / 2 + 0.5})
    assert seeds.error["seed"] == 0.0
    for found, one, other in ((checkpoints, first, second), (seeds, noisy, noisy / 2 + 0.5)):
        expected = stats.ttest_rel(other.mean(axis=0), one.mean(axis=0))
        assert found.p_value == pytest.approx(expected.pvalue)
        assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))


def test_too_few_seeds_questions_or_clusters_get_no_interval():
    for seeds in ((2, 2), (1, 3), (3, 2), (1, 2)):
        first, second = (np.random.default_rng(count).random((count, 9)) for count in seeds)
        found = compare({"b": first}, {"b": second})
        assert found.low is found.high is found.p_value is found.over is found.error is None
        assert found.refused.startswith(f"{seeds[0]} and {seeds[1]} training seeds")
        assert found.difference == pytest.approx(second.mean() - first.mean())
        assert compare_means(first.mean(axis=1), second.mean(axis=1)).low is None
    found = compare({"b": np.array([[0.0]])}, {"b": np.array([[1.0]])})
    assert found.low is None and "b: 1 question; an interval needs 2" in found.refused
    found = compare({"b": FIRST}, {"b": SECOND}, {"b": np.array([0, 0, 1])})
    assert found.low is None and "an interval over clusters needs 5" in found.refused


def test_equal_runs_do_not_differ_and_certainty_is_not_made_up():
    same = compare({"b": FIRST[:1]}, {"b": FIRST[:1]})
    assert (same.difference, same.low, same.high, same.p_value, same.ties) == (0.0, 0.0, 0.0, 1.0, 3)
    # The mean of three times 0.1 is not 0.1, so that its variance is 1e-34: rounding leaves no variance.
    first, second = [0.1] * 3, [0.3] * 3
    assert np.var(first) > 0
    certain = compare({"b": np.zeros((3, 4))}, {"b": np.ones((3, 4))})
    rounded = compare({"b": np.array([first] * 3)}, {"b": np.array([second] * 3)})
    for found in (certain, rounded, compare_means(first, second)):
        assert found.low is found.p_value is None and "nothing to take an error from" in found.refused


def test_a_mean_of_benchmarks_is_the_mean_of_their_means():
    # Of independent benchmarks with half the weight each the questions' errors add up.
    generator = np.random.default_rng(3)
    sides = [{name: generator.random((3, size)) / 2 for name, size in (("a", 30), ("b", 10))} for _ in range(2)]
    found = compare(*sides)
    alone = [compare({name: sides[0][name]}, {name: sides[1][name]}) for name in "ab"]
    assert found.difference == pytest.approx(alone[0].difference + alone[1].difference)
    assert found.error["question"] == pytest.approx(alone[0].error["question"] + alone[1].error["question"])


def test_clusters_widen_the_interval():
    generator = np.random.default_rng(0)
    first, second = (np.repeat(generator.random((3, 12)), 5, axis=1) for _ in range(2))
    clusters = {"b": np.repeat(np.arange(12), 5)}
    clustered, independent = compare({"b": first}, {"b": second}, clusters), compare({"b": first}, {"b": second})
    once = compare({"b": first[:, ::5]}, {"b": second[:, ::5]})
    # Five copies of a question say what one says.
    assert (clustered.low, clustered.high) == pytest.approx((once.low, once.high))
    assert clustered.error["question"] > 4 * independent.error["question"]


def test_numbers_without_questions_get_welchs_interval_and_many_seeds_of_the_steadier_method_no_credit():
    first, second = [0.50, 0.53, 0.49, 0.55], [0.60, 0.58, 0.66]
    found = compare_means(first, second)
    expected = stats.ttest_ind(second, first, equal_var=False)
    assert found.p_value == pytest.approx(expected.pvalue) and found.over == SEEDS and found.wins is None
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    # Variances 1 and 0.01 over 3 and 30 seeds: Satterthwaite's degrees of freedom are 2, and 31 the other way round.
    generator = np.random.default_rng(0)
    few, many = generator.standard_normal(3), generator.standard_normal(30)
    steady = compare_means(few / 100, many)
    half = (steady.high - steady.low) / 2 / sum(steady.error.values()) ** 0.5
    assert half == pytest.approx(stats.t.ppf(0.975, 2 * (3 - 1)))
    welch = stats.ttest_ind(few, many / 100, equal_var=False)
    assert compare_means(few, many / 100).p_value == pytest.approx(welch.pvalue)


def test_shares_are_compared_by_an_exact_test():
    every, none = [True] * 3, [False] * 3
    # Twice the chance of 3 of 3 and 0 of 3 where it is largest, at a half.
    found = compare_shares(none, every)
    assert (found.p_value, found.difference, found.verdict) == (pytest.approx(2 / 64), 1.0, HIGHER)
    assert compare_shares(every, none).verdict == LOWER and compare_shares(every, every).verdict == ALIKE
    assert compare_shares(none, [True, False, False]).verdict == ALIKE
    assert compare_shares([False], every).verdict is None
    with pytest.raises(ValueError, match="at least one training"):
        compare_shares([], every)


def test_the_verdict_is_of_methods_and_corrected_by_holm():
    found = compare_means([0.5, 0.51, 0.52], [0.55, 0.56, 0.57])
    assert found.verdict == HIGHER and 0.003 < found.p_value < 0.004 and found.p_text == "p 0.004"
    checkpoints = compare({"b": np.zeros((1, 9))}, {"b": np.linspace(0.5, 1, 9)[None]})
    assert checkpoints.p_value < 0.001 and checkpoints.verdict is None and checkpoints.p_text == "p < 0.001"
    family = correct_family([found, checkpoints, *[found] * 19])
    assert family[1] is checkpoints and {one.verdict for one in (*family[:1], *family[2:])} == {ALIKE}
    assert family[0].p_value == pytest.approx(20 * found.p_value)


def test_methods_on_other_questions_are_refused():
    other_questions, one_seed = ({"b": FIRST}, {"b": FIRST[:, :2]}), ({"b": FIRST[0]}, {"b": FIRST[0]})
    for first, second in (({}, {}), ({"a": FIRST}, {"b": FIRST}), other_questions, one_seed):
        with pytest.raises(ValueError, match="both need"):
            compare(first, second)


def draw_scores(deviation, seeds, questions, samples, generator):
    """Yields the shares of right samples (seeds, questions) of two methods whose trainings deviate so much.

    Effects are normal, in log-odds; most questions are easy or hard.
    """
    easy = generator.beta(0.6, 0.6, questions).clip(1e-9, 1 - 1e-9)
    for effect in (0.0, 0.2 + 0.3 * generator.standard_normal(questions)):
        training = deviation * generator.standard_normal((seeds, 1)) + 0.3 * generator.standard_normal(
            (seeds, questions)
        )
        chance = 1 / (1 + np.exp(-(np.log(easy / (1 - easy)) + effect + training)))
        yield generator.binomial(samples, chance) / samples


# Trainings differ by 1.4 or 2.7 points, as those of docs/results/small_runs.md do; questions as in small and large
# sets. The second method is better by so much, from two million draws.
TRUTH = {0.1: 0.0268, 0.2: 0.0268}
REPEATS = 300


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_holds_the_truth_as_often_as_it_says(seeds):
    held = []
    for deviation, truth in TRUTH.items():
        for questions, samples in ((30, 16), (256, 8), (500, 1)):
            generator = np.random.default_rng(seeds)
            for _ in range(REPEATS // (1 + seeds // 10)):
                first, second = draw_scores(deviation, seeds, questions, samples, generator)
                found = compare({"b": first}, {"b": second})
                held.append(found.low <= truth <= found.high)
    # 93 to 97 %, and two standard errors of a share of so many experiments.
    slack = 2 * (0.95 * 0.05 / len(held)) ** 0.5
    assert 0.93 - slack <= np.mean(held) <= 0.97 + slack


def test_holms_correction_by_hand():
    # In order 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, of which the last is kept up at 0.06.
    assert np.allclose(holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []
    assert holm([None, 0.03, None, 0.01]) == [None, 0.03, None, 0.02]
