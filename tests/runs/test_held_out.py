"""Rewards of validations, by hand. Not covered: the interval's formula (tests/common/statistics/test_estimate.py)."""

import pytest

from tests.runs.example_runs import write_validation
from verl_clipx.runs.held_out import held_out_rewards


def test_the_interval_is_over_problems_not_samples(tmp_path):
    write_validation(tmp_path, {10: [(1, 1), (1, 0)], 2: [(1, 0), (0, 0)]})
    before, after = held_out_rewards(tmp_path)
    assert (before.step, before.reward.mean, before.problems, before.samples) == (2, 0.25, 2, 4)
    assert (after.step, after.reward.mean) == (10, 0.75)
    # Two problems with means 0.5 and 0: s/sqrt(2) = 0.25, t(0.975, 1) = 12.7062.
    assert before.reward.high == pytest.approx(0.25 + 0.25 * 12.7062, abs=1e-4)


def test_scores_that_are_not_finite_are_left_out_and_counted(tmp_path):
    (tmp_path / "3.jsonl").write_text(
        '{"input": "a", "score": NaN}\n{"input": "a", "score": 1}\n'
        '{"input": "b", "score": null}\n{"input": "c", "score": 0}\n{"input": "c", "score": -Infinity}\n'
    )
    (found,) = held_out_rewards(tmp_path)
    assert found.by_problem == {"a": 1.0, "c": 0.0} and found.reward.mean == 0.5
    assert (found.samples, found.not_finite) == (2, 3)
