"""Logs, traces and outputs that are empty, not finite or closed: a command says what is wrong, and never a traceback.

Covers: diagnose, bounds, replay, report and check-loss at the command line. Not covered: the contents of healthy runs.
"""

import csv
import io
import json
import os
import subprocess
import sys

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from tests.runs.commands import clipx
from tests.runs.example_runs import write_log, write_run
from verl_clipx.replay.of_run import numbers_of_step
from verl_clipx.report.page import _write_csv
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
def test_a_log_without_a_finite_number_is_not_called_healthy(tmp_path, value):
    row = {keys.ENTROPY: value, keys.REWARD: value, keys.RATIO: value}
    text = clipx("diagnose", write_log(tmp_path / "metrics.jsonl", [row] * 20))
    assert "values that are not finite" in text and "none fired" not in text
    other = write_log(tmp_path / "other.jsonl", [{"actor/lr": value}] * 20)
    assert "no metric in its log has a finite number" in clipx("diagnose", other, "--json", code=1)


def test_a_rule_whose_metric_is_never_finite_is_not_among_the_judged(tmp_path):
    finite, mixed = (
        clipx("diagnose", write_log(tmp_path / f"{one}.jsonl", [{keys.ENTROPY: 0.5, keys.REWARD: one}] * 20))
        for one in (0.5, NAN)
    )
    assert finite.split(" rules")[0] != mixed.split(" rules")[0]


@pytest.mark.parametrize("value", [INF, 1e400, 1e308])
def test_infinite_counts_of_skipped_updates_are_no_traceback(tmp_path, value):
    log = write_log(tmp_path / "metrics.jsonl", [{keys.SKIPPED_UPDATES: value, keys.ENTROPY: 0.5}] * 12)
    assert "skipped updates" in clipx("diagnose", log)


@pytest.mark.parametrize(("changed", "value"), [("highest", NAN), ("average", INF), ("count", NAN), ("all", INF)])
def test_bounds_that_are_not_finite_are_refused(tmp_path, changed, value):
    row = {"actor/clipx/epsilon_highest": 0.5, "actor/clipx/epsilon_average": 0.3, "actor/clipx/count/bin_0": 9.0}
    row = {name: value if changed == "all" or changed in name else number for name, number in row.items()}
    text = clipx("table", "bounds", write_log(tmp_path / "metrics.jsonl", [row] * 3), code=1)
    assert "no finite bounds" in text and "+clipx=" not in text


@pytest.mark.parametrize("update", [0, 1, "the last"])
def test_a_step_without_the_files_of_an_update_is_not_called_exact(tmp_path, update):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    updates = sorted((run / "traces").iterdir())
    if update == "the last":
        # Nothing but the record tells that there was one more.
        record = json.loads((run / "metrics.run.json").read_text())
        mini_batch = {"ppo_mini_batch_size": 1, "ppo_epochs": len(updates)}
        record["configuration"]["actor_rollout_ref"] = {"actor": mini_batch}
        record["configuration"]["data"]["train_batch_size"] = 1
        (run / "metrics.run.json").write_text(json.dumps(record))
    assert '"exact": true' in clipx("replay", run, "+clipx=acpo", "--json")
    updates[-1 if update == "the last" else update].unlink()
    assert '"exact": false' in clipx("replay", run, "+clipx=acpo", "--json")
    assert not numbers_of_step(read_run(run), 2)[1]


def change(run, changed):
    for path in (run / "traces").iterdir():
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(changed(table).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("rows", [0, 1])
def test_traces_of_hardly_any_rows(tmp_path, rows):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    change(run, lambda table: table.slice(0, rows))
    text = clipx("replay", run, "+clipx=dapo", "+clipx=bapo", code=0 if rows else 1)
    assert rows or "no update of this step has tokens" in text
    clipx("report", run, "--out", tmp_path / "page")


@pytest.mark.parametrize(
    ("now", "old"), [(-1e30, -1e30), (1e30, 1e30), (0.0, 800.0), (-3e38, 0.0), (0.0, -3e38), (3e38, -3e38)]
)
def test_extreme_log_probabilities(tmp_path, now, old):
    def filled(table):
        for name, value in (("log_prob", now), ("old_log_prob", old)):
            place, field = table.schema.get_field_index(name), table.schema.field(name)
            table = table.set_column(place, field, pyarrow.array([value] * len(table), field.type))
        return table

    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    change(run, filled)
    clipx("replay", run, "+clipx=dapo")


@pytest.mark.parametrize("function", ["./file.py:f", "/tmp/file.py:f", "..:f", "a-b:f", "file.py/:f", ".m:f", "a..b:f"])
def test_a_file_in_place_of_a_module_is_refused(function):
    assert "write it as package.module:name" in clipx("check-loss", function, code=1)


def test_no_name_in_a_table_is_a_formula(tmp_path):
    names = [f"{start}1+1" for start in ("=", "\r=", "\n=", "\t=", "\uff1d", "x\r=", "@", "-")]
    _write_csv(tmp_path / "table.csv", pandas.DataFrame({"run": names, "=x": [0.5] * len(names)}))
    text = (tmp_path / "table.csv").read_bytes().decode()
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["run", "'=x"] and len(rows) == 1 + len(names)
    assert [row[0].removeprefix("'") for row in rows[1:]] == names
    assert all(row[0].startswith(("'", "x")) for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("methods", "never open"),
        ("methods", "by its reader"),
        ("metrics --help", "by its reader"),
        ("table list --json", "never open"),
        ("check-loss ./a.py:f", "by its reader"),
    ],
)
def test_a_closed_standard_output_is_no_traceback(words, closed):
    command = [sys.executable, "-m", "verl_clipx.cli", *words.split()]
    if closed == "never open":
        command = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert closed == "by its reader" or "its output could not be written" in done.stderr
