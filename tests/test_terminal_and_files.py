"""Files of the right kind with wrong content, and terminals, through the command line.

Covers: a column of a trace missing or of another type; prompts that are no chat messages; a full standard output; a
folder of traces that is none; a number of samples that no machine holds; a log cut in its last line; escape sequences
from data; formula cells. Not covered: random content (test_wrong_files.py).
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from tests.papers.evaluation.tiny import save_questions
from tests.runs.example_runs import write_run
from verl_clipx.cli import app


def clipx(*words: object) -> Result:
    """Runs a command, which may end with an exit code but not with a traceback."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with traces; drawing takes seconds and is another test's."""
    monkeypatch.setattr("verl_clipx.report.page.log_plates", lambda *arguments: [])
    monkeypatch.setattr("verl_clipx.report.page.trace_plates", lambda updates: [])
    return write_run(tmp_path / "run", "acpo", steps=2)


def change_column(run: Path, name: str, change) -> Path:
    """Gives the last trace, which the page shows, another column, or none, in a column's place."""
    path = sorted((run / "traces").glob("*.parquet"))[-1]
    table = pyarrow.parquet.read_table(path)
    place, field = table.schema.get_field_index(name), table.schema.field(name)
    changed = change(table.column(name), field)
    table = table.remove_column(place) if changed is None else table.set_column(place, name, changed)
    pyarrow.parquet.write_table(table, path)
    return path


def missing(column, field):
    return None


def of_another_type(column, field):
    return pyarrow.array([[1.0, 2.0]] * len(column))


def without_values(column, field):
    return pyarrow.nulls(len(column), field.type)


@pytest.mark.parametrize(("name", "change"), [("ratio", missing), ("low", of_another_type), ("weight", without_values)])
def test_a_wrong_column_of_a_trace_is_one_error_with_file_and_column(run, tmp_path, name, change):
    path = change_column(run, name, change)
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 1
    assert path.name in result.output and name in result.output


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """What looks like a checkpoint; everything is refused before it is read."""
    folder = tmp_path / "saved"
    (folder / "global_step_1" / "actor").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


PROMPTS = {
    "a string": ["What is 1 + 1?"],
    "a message without content": [[{"role": "user", "content": None}]],
}


def with_prompts(path: Path, prompts: list) -> Path:
    """A benchmark of one row with another prompt."""
    table = pyarrow.parquet.read_table(path).slice(0, 1)
    kind = None if isinstance(prompts[0], str) else table.schema.field("prompt").type
    place = table.schema.get_field_index("prompt")
    pyarrow.parquet.write_table(table.set_column(place, "prompt", pyarrow.array(prompts, kind)), path)
    return path


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_are_no_chat_messages_are_named(tmp_path, checkpoint, kind):
    path = with_prompts(save_questions(tmp_path / "data", 1), PROMPTS[kind])
    shown = clipx("data", "show", path)
    assert shown.exit_code == 0 and "row 0: prompt" in shown.output
    words = ("--benchmark", path, "--out", tmp_path / "out", "--max-tokens", 1, "+hardware=cpu")
    result = clipx("eval", "run", checkpoint, *words)
    assert result.exit_code != 0 and path.name in result.output and "prompt" in result.output


def test_a_number_of_samples_that_no_machine_holds_is_refused(tmp_path, checkpoint):
    path = save_questions(tmp_path / "data", 1)
    words = ("--benchmark", path, "--out", tmp_path / "out", "--max-tokens", 1, "+hardware=cpu")
    result = clipx("eval", "run", checkpoint, *words, "--samples", 100_000_000_000)
    assert result.exit_code != 0 and "--samples" in result.output and "16384" in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize("words", ["methods --markdown", "metrics", "data list"])
def test_a_full_standard_output_is_an_error(words):
    # So wide that lists are tables.
    variables = {**os.environ, "COLUMNS": "400"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "verl_clipx.cli", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    assert done.returncode == 1
    assert "its output could not be written" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_of_traces_that_cannot_be_read_is_an_error(run, tmp_path):
    # Permissions do not keep root out; a file in the folder's place does.
    (run / "traces").rename(tmp_path / "elsewhere")
    (run / "traces").write_text("")
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 1 and "traces" in result.output


def test_a_log_cut_in_its_last_line_is_read_with_a_warning(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "data": {"half wri')
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    assert "metrics.jsonl, line 3: cut off or damaged, and left out" in result.output
    rows = list(csv.DictReader((tmp_path / "page" / "metrics.csv").open()))
    assert {row["step"] for row in rows} == {"1", "2"}


def test_escape_sequences_from_data_and_names_do_not_reach_the_terminal(run, tmp_path):
    named = run.rename(tmp_path / "before\x1b[2J\x1b]0;title\x07\x9b31mafter")
    result = clipx("report", named, "--out", tmp_path / "page")
    assert result.exit_code == 0 and not set("\x1b\x07\x9b") & set(result.output)
    prompt = [[{"role": "user", "content": "before \x1b[2J\x1b]0;title\x07\x9b31m after"}]]
    result = clipx("data", "show", with_prompts(save_questions(tmp_path / "data", 1), prompt))
    assert "before" in result.output and "after" in result.output
    assert not set("\x1b\x07\x9b") & set(result.output)


FORMULAS = ["=1+1", "+1", "-x", "@SUM(A1)", "\tx", "\rx"]


def test_texts_that_are_formulas_are_neutralised_and_numbers_stay(run, tmp_path):
    def formulas(column, field):
        return pyarrow.array([FORMULAS[index % len(FORMULAS)] for index in range(len(column))])

    path = change_column(run, "text", formulas)
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    with (tmp_path / "page" / "tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"'" + text for text in FORMULAS} <= {row["text"] for row in rows}
    assert not [row["text"] for row in rows if row["text"].startswith(tuple("=+-@\t\r"))]
    assert min(pyarrow.parquet.read_table(path).column("advantage").to_pylist()) < 0
    assert min(float(row["advantage"]) for row in rows) < 0
