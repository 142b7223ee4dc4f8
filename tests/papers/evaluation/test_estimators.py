"""avg@k, pass@k, best@k, maj@k and every other metric: values by hand and exact binomials.

Not covered: scores (test_scores.py); how the values are gathered from files (test_commands.py).
"""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml

from verl_clipx.papers.evaluation.estimators import majority_at_k, pass_at_k, question_values

# Of two questions four samples each, right is 4 and 7.
SCORES = pandas.DataFrame(
    {
        "question": [0] * 4 + [1] * 4,
        "answer": ["4", "5", "5", None, "7", "7", None, "7"],
        "length": [0, 1, 2, 3, 10, 11, 12, 13],
        "truncated": [False] * 6 + [True, False],
        "reward/score": [3.0, -0.5, -0.5, -3.0, 3.0, 3.0, -3.0, 3.0],
        "reward/correct": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "reward/format": [1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0],
    }
)


@pytest.mark.parametrize("k", [1, 2, 32, 512, 1024])
def test_pass_at_k_of_many_samples_equals_exact_binomials(k):
    is_right = [True] * 3 + [False] * 1021
    exact = 1 - math.comb(1021, k) / math.comb(1024, k)
    assert pass_at_k([is_right], k)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_pass_at_k_of_more_than_the_samples_or_of_none_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        pass_at_k([[True, False, True]], k)


@pytest.mark.parametrize(("answers", "winner"), yaml.safe_load(Path(__file__).with_name("votes.yaml").read_text()))
def test_majority_at_k_is_the_correctness_of_the_sample_that_the_vote_picks(answers, winner):
    """`winner` is the place of that sample, None if no sample has an answer."""
    winner_alone = np.array([[place == winner for place in range(len(answers))]], dtype=bool)
    assert majority_at_k([answers], winner_alone).tolist() == [float(winner is not None)]
    assert majority_at_k([answers], ~winner_alone).tolist() == [0.0]


def test_every_metric_by_hand():
    values = {metric: of_questions.tolist() for metric, of_questions in question_values(SCORES).items()}
    assert values == {
        "avg@4": [0.25, 0.75],
        "pass@1": [0.25, 0.75],
        "pass@2": [0.5, 1.0],
        "pass@4": [1.0, 1.0],
        "best@1": [0.25, 0.75],
        "best@2": [0.4375, 0.9375],
        "best@4": [0.68359375, 0.99609375],
        "maj@4": [0.0, 1.0],
        "length": [1.5, 11.5],
        "truncated": [0.0, 0.25],
        "format": [0.75, 0.75],
        "reward/score": [-0.25, 1.5],
        "reward/correct": [0.25, 0.75],
        "reward/format": [0.5, 0.5],
    }


WITH_SCORE_ALONE = SCORES.drop(columns=["reward/correct", "reward/format"])


def test_without_other_parts_the_score_says_what_is_right():
    values = question_values(WITH_SCORE_ALONE)
    assert values["avg@4"].tolist() == [0.25, 0.75]
    assert "format" not in values


@pytest.mark.parametrize(("acc", "accuracy"), [(1.0, 1.0), (0.5, 0.0)])
def test_without_a_part_correct_a_part_acc_says_what_is_right(acc, accuracy):
    scores = WITH_SCORE_ALONE.assign(**{"reward/acc": acc})
    assert question_values(scores)["avg@4"].tolist() == [accuracy, accuracy]
