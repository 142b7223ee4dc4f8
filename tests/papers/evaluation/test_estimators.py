"""avg@k, pass@k, maj@k: values by hand, enumeration of all subsets, properties.

Not covered: how the values are gathered from files (test_run.py).
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.common.statistics.estimate import estimate
from verl_clipx.papers.evaluation.estimators import best_at_k, majority_at_k, pass_at_k

TABLES = st.integers(1, 7).flatmap(
    lambda samples: st.lists(st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=1, max_size=4)
)


def by_enumeration(row: list[bool], k: int) -> float:
    subsets = list(itertools.combinations(row, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def test_pass_at_k_by_hand():
    # 1 right of 4: 1 - C(3, k) / C(4, k).
    assert [pass_at_k([[True, False, False, False]], k)[0] for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    # 2 right of 5, k = 2: 1 - 3 / 10; none right; all right.
    table = [[True, True, False, False, False], [False] * 5, [True] * 5]
    assert pass_at_k(table, 2) == pytest.approx([0.7, 0.0, 1.0], abs=1e-15)


@given(TABLES)
def test_pass_at_k_equals_the_enumeration_of_all_subsets(table):
    for k in range(1, len(table[0]) + 1):
        assert pass_at_k(table, k) == pytest.approx([by_enumeration(row, k) for row in table], abs=1e-12)


def test_pass_at_k_of_many_samples_equals_exact_binomials():
    samples, right = 1024, 3
    row = [True] * right + [False] * (samples - right)
    for k in (1, 2, 32, 512, 1024):
        exact = 1 - math.comb(samples - right, k) / math.comb(samples, k)
        assert pass_at_k([row], k)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [2, 8])
def test_best_at_k_is_what_verls_validation_estimates(k):
    from verl.trainer.ppo.metric_utils import bootstrap_metric

    right = [True, False, False, False, True, False, False, False]
    drawn = bootstrap_metric(right, subset_size=k, reduce_fns=[np.max], n_bootstrap=4000)[0][0]
    # The mean of 4,000 draws has a standard error of at most 0.008.
    assert best_at_k([right], k)[0] == pytest.approx(drawn, abs=0.03)
    assert (
        best_at_k([right], k)[0] == pytest.approx(1 - 0.75**k) and best_at_k([right], k)[0] < pass_at_k([right], k)[0]
    )


@pytest.mark.parametrize("k", [0, 4, -1])
def test_pass_at_k_refuses_more_draws_than_samples(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        pass_at_k([[True, False, True]], k)


def test_the_interval_is_over_questions_not_samples():
    # Copying every sample a hundred times adds no information about other questions.
    table = np.array([[True, False], [True, True], [False, False]])
    few, many = estimate(table.mean(axis=1)), estimate(np.repeat(table, 100, 1).mean(axis=1))
    assert few == many


@pytest.mark.parametrize(
    ("answers", "choice"),
    [
        (["a"], 0),
        (["a", "b", "b"], 1),
        (["a", "b", "b", "a"], 0),  # a tie: "a" was given first
        ([None, "b", "a", "b", "a"], 1),
        ([None, None, None, "z"], 3),  # no answer has no vote
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_at_k_is_the_correctness_of_the_sample_that_the_vote_picks(answers, choice):
    only = [[place == choice for place in range(len(answers))]]
    assert majority_at_k([answers], np.array(only)).tolist() == [float(choice is not None)]
    assert majority_at_k([answers], ~np.array(only, dtype=bool)).tolist() == [0.0]
