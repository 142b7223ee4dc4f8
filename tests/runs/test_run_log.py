"""verl's file log as a table: whole, growing, missing, empty, cut short and foreign logs, validation's own line."""

import pytest

from tests.runs.example_runs import log_line
from verl_clipx.runs.run_log import read_growing_rows, read_run_log

WHOLE = log_line(0, **{"val": 0.25}) + log_line(1, loss=2.0) + log_line(1, **{"val": 0.5}) + log_line(2, loss=1.0)


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "metrics.jsonl"
        path.write_text(text)
        return path

    return write


def test_a_row_a_step(log):
    table = read_run_log(log(WHOLE))
    assert list(table.index) == [0, 1, 2]
    assert table.loc[1].to_dict() == {"val": 0.5, "loss": 2.0}


def test_a_log_that_was_cut_short_is_read_with_a_warning(log):
    path = log(WHOLE + '{"step": 3, "data": {"half wri')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: its last line is cut off and was left out"):
        assert list(read_run_log(path).index) == [0, 1, 2]
    assert sorted(read_growing_rows(path)) == [0, 1, 2]


@pytest.mark.parametrize("text", ["# Notes\n", '{"loss": 1.0}\n', "[1, 2]\n", "1\n", '{"step": "a", "data": {}}\n'])
def test_something_else_is_refused(log, text):
    with pytest.raises(ValueError, match="line 1: not a line"):
        read_run_log(log(text))
    with pytest.raises(ValueError, match="line 1: not a line"):
        read_growing_rows(log(text))


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_log_is_refused(log, text):
    with pytest.raises(ValueError, match="empty: the run has not logged its first step yet"):
        read_run_log(log(text))


def test_a_missing_log_says_how_to_get_one(tmp_path):
    path = tmp_path / "none.jsonl"
    assert read_growing_rows(path) == {}
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger"):
        read_run_log(path)
