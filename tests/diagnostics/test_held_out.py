"""Rewards of validations and Student's intervals, by hand."""

import pytest

from tests.diagnostics.runs import write_validation
from verl_clipx.diagnostics.held_out import HeldOutReward, held_out_rewards
from verl_clipx.diagnostics.intervals import mean_interval


def test_the_interval_is_over_problems_not_samples(tmp_path):
    write_validation(tmp_path, {0: [(1, 0), (0, 0)], 3: [(1, 1), (1, 0)]})
    before, after = held_out_rewards(tmp_path)
    assert (before.step, before.mean, before.problems, before.samples) == (0, 0.25, 2, 4)
    assert after.mean == 0.75
    # Two problems with means 0.5 and 0: s/sqrt(2) = 0.25, t(0.975, 1) = 12.7062.
    assert before.high == pytest.approx(0.25 + 0.25 * 12.7062, abs=1e-4)


def test_the_interval_by_hand():
    # mean 2/3, s = 0.5, s/3 = 1/6, t(0.975, 8) = 2.306004
    found = mean_interval([1, 0, 1, 1, 0, 1, 0, 1, 1])
    assert found.low == pytest.approx(2 / 3 - 2.306004 / 6, abs=1e-6)
    assert found.high == pytest.approx(2 / 3 + 2.306004 / 6, abs=1e-6)
    assert mean_interval([3.0]) == (3.0, 3.0, 3.0)


def test_values_that_do_not_vary_have_no_interval():
    assert mean_interval([0.1] * 3).low == mean_interval([0.1] * 3).high
    assert str(HeldOutReward(1, *mean_interval([0.0] * 9), {}, 9)) == "0.000 (no interval, as nothing varies)"


def test_scores_that_are_not_finite_are_left_out_and_counted(tmp_path):
    (tmp_path / "3.jsonl").write_text(
        '{"input": "a", "score": NaN}\n{"input": "a", "score": 1}\n'
        '{"input": "b", "score": null}\n{"input": "c", "score": 0}\n{"input": "c", "score": -Infinity}\n'
    )
    (found,) = held_out_rewards(tmp_path)
    assert found.by_problem == {"a": 1.0, "c": 0.0} and found.mean == 0.5
    assert (found.samples, found.not_finite) == (2, 3)
