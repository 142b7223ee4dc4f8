"""Run log, held-out reward, figure and report.

Covers: the numbers, by hand; files that are half written. Not covered: how a figure looks.
"""

import json

import pytest

from tests.diagnostics.runs import write_run
from verl_clipx.diagnostics.held_out import held_out_rewards
from verl_clipx.diagnostics.report import write_report
from verl_clipx.diagnostics.run_log import last_step, read_run_log


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path)


def test_a_half_written_line_is_left_out(folder):
    log = read_run_log(folder.metrics)
    assert list(log.index) == [0, 1, 2, 3]
    assert last_step(folder.metrics) == 3


def test_a_missing_log_says_how_to_get_one(tmp_path):
    assert last_step(tmp_path / "none.jsonl") == 0
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger"):
        read_run_log(tmp_path / "none.jsonl")


def test_the_interval_is_over_problems_not_samples(folder):
    before, after = held_out_rewards(folder.validation)
    assert (before.step, before.mean, before.problems, before.samples) == (0, 0.25, 2, 4)
    assert after.mean == 0.75
    # Two problems with means 0.5 and 0: s/sqrt(2) = 0.25, t(0.975, 1) = 12.7062; the interval is cut to [0, 1].
    assert (before.low, before.high) == (0.0, 1.0)


def test_the_interval_by_hand(tmp_path):
    scores = [1, 0, 1, 1, 0, 1, 0, 1, 1]
    lines = [json.dumps({"input": str(index), "score": score}) for index, score in enumerate(scores)]
    (tmp_path / "7.jsonl").write_text("\n".join(lines))
    (reward,) = held_out_rewards(tmp_path)
    # mean 2/3, s = 0.5, s/3 = 1/6, t(0.975, 8) = 2.306004
    assert reward.low == pytest.approx(2 / 3 - 2.306004 / 6, abs=1e-6)
    assert reward.high == 1.0


def test_the_report_says_what_happened(folder):
    text = write_report(folder, "a run")
    assert "before (step 0): 0.250" in text and "after (step 3): 0.750" in text
    assert "+0.500 (the intervals overlap: no clear change)" in text
    assert "gradient mass |F*A| outside the bounds: 25.00%" in text
    assert "upper bound: mean 1.900, from 1.200 to 3.000" in text
    assert folder.figure.stat().st_size > 10_000
    assert str(folder.figure) in text
