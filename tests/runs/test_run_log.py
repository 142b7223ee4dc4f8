"""verl's file log as a table: whole, missing, empty, cut short, damaged and foreign logs, validation's own line.

Covers too: all commands read a damaged one alike.
"""

import json

import pytest
from omegaconf import OmegaConf

from tests.runs.example_runs import log_line
from verl_clipx.runs.folder import RunFolder, read_run
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
