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


def test_pass_at_k_of_many_samples_equals_exact_binomials_and_too_many_draws_are_refused():
    samples, right = 1024, 3
    row = [True] * right + [False] * (samples - right)
    for k in (1, 2, 32, 512, 1024):
        exact = 1 - math.comb(samples - right, k) / math.comb(samples, k)
        assert pass_at_k([row], k)[0] == pytest.approx(exact, rel=1e-12)
    for k in (0, 4, -1):
        with pytest.raises(ValueError, match=f"k={k}"):
            pass_at_k([[True, False, True]], k)


@pytest.mark.parametrize(("answers", "choice"), yaml.safe_load(Path(__file__).with_name("votes.yaml").read_text()))
def test_majority_at_k_is_the_correctness_of_the_sample_that_the_vote_picks(answers, choice):
    only = [[place == choice for place in range(len(answers))]]
    assert majority_at_k([answers], np.array(only)).tolist() == [float(choice is not None)]
    assert majority_at_k([answers], ~np.array(only, dtype=bool)).tolist() == [0.0]


def test_every_metric_by_hand():
    assert {metric: column.tolist() for metric, column in question_values(SCORES).items()} == {
        **{"avg@4": [0.25, 0.75], "pass@1": [0.25, 0.75], "pass@2": [0.5, 1.0], "pass@4": [1.0, 1.0]},
        **{"best@1": [0.25, 0.75], "best@2": [0.4375, 0.9375], "best@4": [0.68359375, 0.99609375]},
        **{"maj@4": [0.0, 1.0], "length": [1.5, 11.5], "truncated": [0.0, 0.25], "format": [0.75, 0.75]},
        **{"reward/score": [-0.25, 1.5], "reward/correct": [0.25, 0.75], "reward/format": [0.5, 0.5]},
    }
    # Without a part `correct`, `acc` decides, and without that `score`.
    bare = SCORES.drop(columns=["reward/correct", "reward/format"])
    assert question_values(bare)["avg@4"].tolist() == [0.25, 0.75] and "format" not in question_values(bare)
    for least, right in ((1.0, 1.0), (0.5, 0.0)):
        assert question_values(bare.assign(**{"reward/acc": least}))["avg@4"].tolist() == [right, right]
