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

from verl_clipx.common.files import read_json

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="rehearsed on a CPU")]


def start(*words: str):
    """Starts the script's program in this process, which has imported what it needs; its parts have processes."""
    program = typer.Typer()
    program.command()(gpu.main)
    return CliRunner().invoke(program, words)


def cells(printed: str) -> dict[str, list[str]]:
    """The rows of the tables in what was printed, by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {first: others for first, *others in lines}


def check_tests(part: dict) -> None:
    """Checks that of a part's tests only the one that needs a GPU did not pass."""
    tests = part["tests"]
    assert {test for test, outcome in tests.items() if outcome != "passed"} == {gpu.HOST_WAITS} and len(tests) > 20


def test_what_a_cpu_can_run_of_the_tests_for_a_gpu_passes(tmp_path):
    done = start("--rehearse", "--only", "tests on 1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    parts = read_json(tmp_path / "CPU-rehearsal.json")["parts"]
    assert [*parts] == ["tests on 1"]
    check_tests(parts["tests on 1"])


@pytest.mark.matrix
def test_every_part_leaves_its_result_whatever_becomes_of_another(tmp_path):
    # The quick start's script cannot count with this number of responses.
    command = ["bash", "scripts/gpu.sh", "--rehearse", "--rollout", "--train", "--out", str(tmp_path)]
    given = {"cwd": ROOT, "env": os.environ | {"ROLLOUT_N": "2*("}, "timeout": 900}
    done = subprocess.run(command, capture_output=True, text=True, **given)
    rows = cells(done.stdout)
    outcomes = {
        "floor": "passed",
        "losses": "passed",
        "update": "passed",
        "tests on 1": "passed",
        "tests on 2": "passed",
    }
    outcomes |= {"rollout": "skipped", "train": "failed"}
    assert {name: rows[name][0] for name in outcomes} == outcomes, done.stdout + done.stderr
    assert done.returncode == 1
    record = read_json(tmp_path / "CPU-rehearsal.json")
    parts = record["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == outcomes
    assert (record["device"], record["kind"], record["rehearsal"]) == ("CPU", "cpu", True)
    assert {len(part["commit"]) for part in parts.values()} <= {40, 0} and "MICRO_BATCH_SIZE" in str(
        parts["train"]["end"]
    )
    (shape,) = parts["losses"]["figures"]["shapes"].values()
    names = {f"clipx_acpo, {form}{own}" for form in ("eager", "compiled") for own in ("", ", own statistics")}
    assert {*shape["rows"]} == {"vanilla", *names} and shape["floor"] > 0
    for row in shape["rows"].values():
        assert row["launches"] > 5 and all(row[key] > 0 for key in ("kernels", "megabytes", "first_call"))
    # The compiler works in the first call.
    assert shape["rows"]["clipx_acpo, compiled"]["first_call"] > 10 * shape["rows"]["vanilla"]["first_call"]
    (update,) = parts["update"]["figures"]["updates"].values()
    acpo = [f"acpo, {scope}" for scope in ("lagged", "mini_batch", "mini_batch, larger extra pass")]
    assert {*update} == {"vanilla", "observe", *acpo} and all(row["of_vanilla"] > 0 for row in update.values())
    check_tests(parts["tests on 1"])
    assert {*parts["tests on 2"]["tests"].values()} == {"passed"}
    # The last of each goal is what was reached of it.
    assert float(rows["the same, own statistics"][-1].partition(",")[0]) > 0
    assert rows["tests/gpu on two GPUs, failures"][-1] == "0"
    assert rows["calls that wait more than once"][-1] == "1, **missed**"


def test_a_part_whose_time_is_over_says_so_and_what_an_earlier_start_wrote_stays(tmp_path):
    given = ("--rehearse", "--limit", "0.2", "--out", str(tmp_path))
    names = ["floor", "losses", "update", "tests on 1", "tests on 2"]
    for words, stay in (((), names), (("--train",), [*names, "train"]), ((), [*names, "train"])):
        done = start(*given, *words)
        assert done.exit_code == 1
        assert {cells(done.stdout)[name][0] for name in stay} == {"timed out after 0.2 s"}
        assert cells(done.stdout)["tests/gpu on one GPU, failures"] == ["0", "1, **missed**"]
        assert [*read_json(tmp_path / "CPU-rehearsal.json")["parts"]] == stay


def test_without_a_gpu_nothing_is_measured():
    for words, message in (((), "There is no CUDA device here"), (("--rehearse",), "name a folder")):
        done = start(*words)
        assert done.exit_code == 1 and message in done.output
