"""What `clipx gpu-check` says of results, and its exit code.

Covers: the command with given results: table, last line, logs of failures, JSON, exit codes; machines that it refuses.
Not covered: the checks (test_checks.py), their processes (test_ranks.py, tests/end_to_end/test_gpu_check.py).
"""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.gpu_check import run
from verl_clipx.gpu_check.report import Measured, Result, exit_code, last_line, result_of

PASS = result_of("packing", Measured(True, "gradient 1e-06 [close]", {"gradient_difference": 1e-6}), 2.4)
FAIL = Result("Ulysses 2", "fail", "rank 1: ValueError: no [heads]", seconds=3.0, log=("rank 1: Traceback", "last"))
SKIP = Result("FSDP1", "skip", "FSDP1 cannot start from CPU parameters")


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs the command with given results; returns its exit code, output and JSON."""

    def run_command(*results):
        monkeypatch.setattr(run, "results", lambda machine: iter(results))
        file = tmp_path / "found.json"
        words = ["gpu-check", "--device", "cpu", "--out", str(file)]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
        return done.exit_code, done.stdout, json.loads(file.read_text())

    return run_command


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([PASS], 0),
        ([PASS, SKIP], 0),
        ([PASS, FAIL], 1),
        ([PASS, FAIL, SKIP], 1),
        # Nothing is known then.
        ([SKIP], 1),
        ([], 1),
    ],
)
def test_only_what_passed_without_a_failure_ends_with_0(results, code):
    assert exit_code(results) == code


def test_a_folder_for_the_results_is_refused_before_the_checks(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "results", lambda machine: pytest.fail("the checks ran"))
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--out", str(tmp_path)], env={"COLUMNS": "400"})
    assert done.exit_code == 2 and f"--out {tmp_path}: a folder; name the file to write" in done.output


def test_a_check_that_measures_too_much_fails():
    assert result_of("memory", Measured(False, "1.4 of the plan"), 1.0).outcome == "fail"


def test_the_last_line_counts_what_was_skipped_by_a_word_of_its_own():
    assert last_line([PASS, PASS]) == "2 passed, 0 failed, 0 skipped"
    assert last_line([PASS, FAIL, SKIP]) == "1 passed, 1 failed, 1 skipped: nothing is known about skipped checks"


def test_the_command_shows_every_result_and_a_failures_log(check):
    code, output, document = check(SKIP, PASS, FAIL)
    assert code == 1
    rows = {
        name: next(line for line in output.splitlines() if name in line and "│" in line)
        for name in ("packing", "Ulysses", "FSDP1")
    }
    for name, word in (("packing", "pass"), ("Ulysses", "fail"), ("FSDP1", "skip")):
        assert rows[name].split()[1] == word
    # Brackets of a message are no markup.
    assert "1e-06 [close]" in output and "no [heads]" in output
    assert "rank 1: Traceback\nlast\n" in output
    assert output.splitlines()[-1].startswith("1 passed, 1 failed, 1 skipped")
    assert document["counts"] == {"pass": 1, "fail": 1, "skip": 1}
    assert document["machine"]["device"] == "cpu" and document["machine"]["packages"]["verl"]
    found = {one["name"]: one for one in document["checks"]}
    assert found["packing"]["numbers"] == {"gradient_difference": 1e-6} and found["packing"]["seconds"] == 2.4
    assert found["FSDP1"]["found"].startswith("FSDP1 cannot") and found["Ulysses 2"]["log"][0].endswith("Traceback")


def test_each_result_is_there_before_the_next_check_runs(monkeypatch, tmp_path, capfd):
    file, seen = tmp_path / "found.json", []

    def results(machine):
        yield PASS
        seen.append((capfd.readouterr().out, json.loads(file.read_text())["counts"]["pass"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "results", results)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        app(["gpu-check", "--device", "cpu", "--out", str(file)])
    assert seen == [("pass: packing, 2 s: gradient 1e-06 [close]\n", 1)]


def test_a_number_that_is_none_is_null_in_the_json(check):
    _, _, document = check(result_of("packing", Measured(False, "nan", {"gradient_difference": math.nan}), 1.0))
    assert document["checks"][0]["numbers"] == {"gradient_difference": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus 0: must be one of 1, 2, 4"),
        (["--device", "tpu"], "--device tpu: must be cuda or cpu"),
        (["--gpus", "3"], "--gpus 3: must be one of 1, 2, 4"),
    ],
)
def test_a_machine_that_is_not_there_is_refused_by_its_option(words, said):
    done = CliRunner().invoke(app, ["gpu-check", *words])
    assert done.exit_code == 2 and said in done.stdout


def test_more_gpus_than_there_are_is_refused_with_what_a_cpu_can_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = CliRunner().invoke(app, ["gpu-check", "--gpus", "2"])
    assert done.exit_code == 2
    assert "--gpus 2: torch sees 1 GPUs here" in done.stdout and "--device cpu" in done.stdout
