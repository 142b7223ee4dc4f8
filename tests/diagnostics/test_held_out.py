"""Rewards of validations and Student's intervals, by hand."""

import pytest

from tests.diagnostics.runs import write_validation
from verl_clipx.diagnostics.held_out import held_out_rewards
from verl_clipx.diagnostics.intervals import difference_interval, mean_interval


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


def test_the_difference_of_two_means_by_hand():
    # Equal variances of 1 and 3 values each: s^2 (1/3 + 1/3) = 2/3, 4 degrees of freedom, t(0.975, 4) = 2.776445
    found = difference_interval([1, 2, 3], [4, 5, 6])
    assert found.mean == 3
    assert found.high == pytest.approx(3 + 2.776445 * (2 / 3) ** 0.5, abs=1e-5)
    assert difference_interval([1, 1], [2, 2]) == (1, 1, 1)
