"""What verl writes of a run: its file log as a table, whole, missing, empty, cut short, damaged or foreign, which all
commands read alike; the rewards of its validations, by hand. Not covered: the interval's formula (tests/common).
"""

import json

import pytest
from omegaconf import OmegaConf

from tests.runs.example_runs import log_line, write_validation
from verl_clipx.runs.folder import RunFolder, read_run
from verl_clipx.runs.held_out import held_out_rewards
from verl_clipx.runs.run_log import read_run_log
from verl_clipx.trainer.log import kept_lines

WHOLE = log_line(0, **{"val": 0.25}) + log_line(1, loss=2.0) + log_line(1, **{"val": 0.5}) + log_line(2, loss=1.0)
CUT = '{"step": 3, "data": {"half wri'


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "metrics.jsonl"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (WHOLE + CUT, 5),
        (WHOLE[: WHOLE.index("\n") + 1] + CUT + "\n" + WHOLE, 2),
        (WHOLE + "[1, 2]\n", 5),
        (WHOLE + log_line(2**60), 5),
    ],
)
def test_a_line_that_is_cut_off_or_damaged_is_left_out_with_a_warning(log, text, line):
    with pytest.warns(UserWarning, match=rf"metrics\.jsonl, line {line}: cut off or damaged, and left out"):
        table = read_run_log(log(text))
    assert list(table.index) == [0, 1, 2] and table.loc[1].to_dict() == {"val": 0.5, "loss": 2.0}


@pytest.mark.filterwarnings("ignore:.*cut off or damaged")
def test_reports_tables_and_a_run_that_goes_on_read_a_damaged_log_alike(log):
    lines = [log_line(step, **{"actor/x": 1.0 * step}) for step in (1, 2, 3)]
    path = log(lines[0] + CUT + "\n" + "".join(lines[1:]) + CUT)
    (path.parent / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create({"data": {"seed": 1}}), path.parent / ".hydra" / "config.yaml")
    assert list(read_run(path.parent).log.index) == sorted(RunFolder(path.parent).metrics) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in kept_lines(path, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "line 1: not a line") for text in ("# Notes\n", '{"loss": 1.0}\n', "[1, 2]\n", "1\n")),
        ('{"step": "a", "data": {}}\n', "line 1: not a line"),
        *((text, "empty: the run has not logged its first step yet") for text in ("", "\n")),
    ],
)
def test_something_else_is_refused(log, text, message):
    with pytest.raises(ValueError, match=message):
        read_run_log(log(text))


def test_a_missing_log_says_how_to_get_one(tmp_path):
    assert RunFolder(tmp_path).metrics == {}
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger"):
        read_run_log(tmp_path / "none.jsonl")


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
