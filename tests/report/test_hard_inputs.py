"""Logs, traces and outputs that are empty, not finite or closed: a command says what is wrong, and never a traceback.

Covers: diagnose, bounds, replay, report and check-loss at the command line. Not covered: the contents of healthy runs.
"""

import csv
import fcntl
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import write_log, write_run
from verl_clipx.cli import app
from verl_clipx.runs import keys

NAN, INF = float("nan"), float("inf")


def clipx(*words):
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def said(*words, code):
    done = clipx(*words)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_log_without_a_finite_number_is_not_called_healthy(tmp_path, value, option):
    row = {keys.ENTROPY: value, keys.REWARD: value, keys.RATIO: value}
    log = write_log(tmp_path / "metrics.jsonl", [row] * 20)
    text = said("diagnose", log, *option, code=0)
    assert "values that are not finite" in text and "found anything" not in text
    other = write_log(tmp_path / "other.jsonl", [{"actor/lr": value}] * 20)
    assert "no metric in its log has a finite number" in said("diagnose", other, *option, code=1)


def test_a_rule_whose_metric_is_never_finite_is_not_among_the_judged(tmp_path):
    finite, mixed = ({keys.ENTROPY: 0.5, keys.REWARD: one} for one in (0.5, NAN))
    counts = [
        said("diagnose", write_log(tmp_path / f"{number}.jsonl", [row] * 20), code=0).split(" rules")[0]
        for number, row in enumerate((finite, mixed))
    ]
    assert counts[0] != counts[1]


@pytest.mark.parametrize("value", [INF, 1e400, 1e308])
def test_infinite_counts_of_skipped_updates_are_no_traceback(tmp_path, value):
    log = write_log(tmp_path / "metrics.jsonl", [{keys.SKIPPED_UPDATES: value, keys.ENTROPY: 0.5}] * 12)
    assert "skipped updates" in said("diagnose", log, code=0)
    said("report", log, "--out", tmp_path / "page", code=0)


@pytest.mark.parametrize("changed", ["highest", "average", "count", "all"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_bounds_that_are_not_finite_are_refused(tmp_path, changed, value):
    row = {"actor/clipx/epsilon_highest": 0.5, "actor/clipx/epsilon_average": 0.3, "actor/clipx/count/bin_0": 9.0}
    row = {name: value if changed == "all" or changed in name else number for name, number in row.items()}
    text = said("table", "bounds", write_log(tmp_path / "metrics.jsonl", [row] * 3), code=1)
    assert "no finite bounds" in text and "+clipx=" not in text


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_a_target_or_a_range_that_is_not_finite_is_refused(tmp_path, number):
    run = write_run(tmp_path / "grpo-seed1", "grpo")
    words = ("replay", run, "+clipx=acpo", "clipx.alpha=0,4", "--match", f"clip_fraction={number}")
    assert f"--match clip_fraction={number}: must be" in said(*words, code=1)


@pytest.mark.parametrize("update", [0, 1, "the last"])
def test_a_step_without_the_files_of_an_update_is_not_called_exact(tmp_path, update):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    updates = sorted((run / "traces").iterdir())
    if update == "the last":
        # Nothing but the record tells that there was one more.
        record = json.loads((run / "metrics.run.json").read_text())
        mini_batch = {"ppo_mini_batch_size": 1, "ppo_epochs": len(updates)}
        record["configuration"]["actor_rollout_ref"] = {"actor": mini_batch}
        record["configuration"]["data"]["train_batch_size"] = 1
        (run / "metrics.run.json").write_text(json.dumps(record))
    assert '"exact": true' in said("replay", run, "+clipx=grpo", "--json", code=0)
    updates[-1 if update == "the last" else update].unlink()
    assert '"exact": false' in said("replay", run, "+clipx=grpo", "--json", code=0)
    assert "Exact" not in said("report", run, "--out", tmp_path / "page", code=0)


def change(run, changed):
    for path in (run / "traces").iterdir():
        table = pyarrow.parquet.read_table(path)
        new = changed(table).replace_schema_metadata(table.schema.metadata)
        pyarrow.parquet.write_table(new, path)


def filled(table, **values):
    for name, value in values.items():
        place, kind = table.schema.get_field_index(name), table.schema.field(name)
        table = table.set_column(place, kind, pyarrow.array([value] * len(table), kind.type))
    return table


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_traces_of_hardly_any_rows(tmp_path, rows):
    run = write_run(tmp_path / "acpo-seed1", "acpo")
    change(run, lambda table: table.slice(0, rows))
    text = said("replay", run, "+clipx=dapo", "+clipx=bapo", code=0 if rows else 1)
    assert rows or "no update of this step has tokens" in text
    said("report", run, "--out", tmp_path / "page", code=0)


@pytest.mark.parametrize(
    ("now", "old"), [(-1e30, -1e30), (1e30, 1e30), (0.0, 800.0), (-3e38, 0.0), (0.0, -3e38), (3e38, -3e38)]
)
def test_extreme_log_probabilities(tmp_path, now, old):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    change(run, lambda table: filled(table, log_prob=now, old_log_prob=old))
    said("replay", run, "+clipx=dapo", code=0)


@pytest.mark.parametrize("function", ["./file.py:f", "/tmp/file.py:f", "..:f", "a-b:f", "file.py/:f", ".m:f", "a..b:f"])
def test_a_file_in_place_of_a_module_is_refused(function):
    assert "write it as package.module:name" in said("check-loss", function, code=1)


@pytest.mark.parametrize("start", ["=", "\r=", "\n=", "\t=", "\uff1d", "x\r="])
def test_a_name_in_the_metrics_is_never_a_formula(tmp_path, start):
    run = write_run(tmp_path / f"{start}1+1-seed1", "grpo", traced=False)
    said("report", run, "--out", tmp_path / "page", code=0)
    text = (tmp_path / "page" / "metrics.csv").read_bytes().decode()
    rows = list(csv.DictReader(text.splitlines(keepends=True) if "\r=" not in start else text.split("\r\n")))
    assert all(not cell.startswith(("=", "\r", "\n", "\t", "\uff1d")) for row in rows for cell in row.values())
    assert "\r=" not in start or '"' in text


def test_a_report_waits_for_another_one_into_its_folder(tmp_path):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2, traced=False)
    page = tmp_path / "page"
    page.mkdir()
    command = [sys.executable, "-m", "verl_clipx.cli", "report", str(run), "--out", str(page)]
    descriptor = os.open(page, os.O_RDONLY)
    try:
        # As a report does while it writes.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(45)
        assert list(page.iterdir()) == []
    finally:
        os.close(descriptor)
    assert second.wait(120) == 0 and (page / "report.html").exists()


@pytest.mark.parametrize("words", ["methods", "metrics --help", "table list --json", "check-loss ./a.py:f"])
@pytest.mark.parametrize("closed", ["never open", "by its reader"])
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
