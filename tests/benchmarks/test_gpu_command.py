"""`bash scripts/gpu.sh`, rehearsed on a CPU with tiny shapes: of tests/gpu the losses, verl's vanilla, FSDP2 and
another bound pass; what parts leave whose time is over. With `-m matrix` every part: what it writes and prints, also of
parts that fail. Not covered: figures of a GPU; what pages make of its file (tests/run/test_support.py); the quick
start's own command (tests/claims/test_quickstart.py).
"""

import os
import subprocess
from pathlib import Path

import gpu
import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.messages import assert_names
from verl_clipx.common.files import read_json

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="rehearsed on a CPU")]


def run_script(*words: str):
    """Run the script's program in this process, which has imported what it needs; its parts have processes."""
    program = typer.Typer()
    program.command()(gpu.main)
    return CliRunner().invoke(program, words)


def read_tables(output: str) -> dict[str, list[str]]:
    """Return the rows of the printed tables: from the first cell to the others."""
    rows = {}
    for line in output.splitlines():
        if line.startswith("| "):
            first_cell, *others = line.strip("| ").split(" | ")
            rows[first_cell] = others
    return rows


def assert_passed_but_for_gpu(part: dict) -> None:
    """Assert that of a part's tests only the one that needs a GPU did not pass."""
    tests = part["tests"]
    assert len(tests) > 20
    assert {test for test, outcome in tests.items() if outcome != "passed"} == {gpu.HOST_WAITS}


def test_what_a_cpu_can_run_of_the_tests_for_a_gpu_passes(tmp_path):
    result = run_script("--rehearse", "--only", "tests on 1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    parts = read_json(tmp_path / "CPU-rehearsal.json")["parts"]
    assert [*parts] == ["tests on 1"]
    assert_passed_but_for_gpu(parts["tests on 1"])


EXPECTED_OUTCOMES = {
    "floor": "passed",
    "losses": "passed",
    "update": "passed",
    "tests on 1": "passed",
    "tests on 2": "passed",
    "rollout": "skipped",
    # It is given a number of responses with which the quick start's script cannot count.
    "train": "failed",
}


@pytest.mark.matrix
def test_every_part_leaves_its_result_whatever_becomes_of_another(tmp_path):
    script = subprocess.run(
        ["bash", "scripts/gpu.sh", "--rehearse", "--rollout", "--train", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"ROLLOUT_N": "2*("},
        timeout=900,
    )
    rows = read_tables(script.stdout)
    printed_outcomes = {name: rows[name][0] for name in EXPECTED_OUTCOMES}
    assert printed_outcomes == EXPECTED_OUTCOMES, script.stdout + script.stderr
    assert script.returncode == 1

    record = read_json(tmp_path / "CPU-rehearsal.json")
    assert record["device"] == "CPU"
    assert record["kind"] == "cpu"
    assert record["rehearsal"] is True
    parts = record["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == EXPECTED_OUTCOMES
    # Without a repository there is none.
    assert {len(part["commit"]) for part in parts.values()} <= {40, 0}
    assert "MICRO_BATCH_SIZE" in str(parts["train"]["end"])
    assert_losses_were_measured(parts["losses"])
    assert_updates_were_measured(parts["update"])
    assert_passed_but_for_gpu(parts["tests on 1"])
    assert {*parts["tests on 2"]["tests"].values()} == {"passed"}

    # The last cell of each goal is what was reached of it.
    assert float(rows["the same, own statistics"][-1].partition(",")[0]) > 0
    assert rows["tests/gpu on two GPUs, failures"][-1] == "0"
    assert rows["calls that wait more than once"][-1] == "1, **missed**"


def assert_losses_were_measured(part: dict) -> None:
    (shape,) = part["figures"]["shapes"].values()
    rows = shape["rows"]
    assert {*rows} == {
        "vanilla",
        "clipx_acpo, eager",
        "clipx_acpo, eager, own statistics",
        "clipx_acpo, compiled",
        "clipx_acpo, compiled, own statistics",
    }
    assert shape["floor"] > 0
    for row in rows.values():
        assert row["launches"] > 5
        assert all(row[key] > 0 for key in ("kernels", "megabytes", "first_call"))
    # The compiler works in the first call.
    assert rows["clipx_acpo, compiled"]["first_call"] > 10 * rows["vanilla"]["first_call"]


def assert_updates_were_measured(part: dict) -> None:
    (update,) = part["figures"]["updates"].values()
    assert {*update} == {
        "vanilla",
        "observe",
        "acpo, lagged",
        "acpo, mini_batch",
        "acpo, mini_batch, larger extra pass",
    }
    assert all(row["of_vanilla"] > 0 for row in update.values())


def test_a_part_whose_time_is_over_says_so_and_what_an_earlier_start_wrote_stays(tmp_path):
    usual_parts = ["floor", "losses", "update", "tests on 1", "tests on 2"]
    # The second start asks for the training too, and the third one finds what became of it.
    for options, parts in (([], usual_parts), (["--train"], [*usual_parts, "train"]), ([], [*usual_parts, "train"])):
        result = run_script("--rehearse", "--limit", "0.2", "--out", str(tmp_path), *options)
        assert result.exit_code == 1
        rows = read_tables(result.stdout)
        assert {rows[part][0] for part in parts} == {"timed out after 0.2 s"}
        assert rows["tests/gpu on one GPU, failures"] == ["0", "1, **missed**"]
        assert [*read_json(tmp_path / "CPU-rehearsal.json")["parts"]] == parts


@pytest.mark.parametrize(("words", "fact"), [([], "no CUDA device here"), (["--rehearse"], "name a folder")])
def test_without_a_gpu_nothing_is_measured_and_a_rehearsal_needs_a_folder(words, fact):
    result = run_script(*words)
    assert result.exit_code == 1
    assert_names(result.output, fact)
