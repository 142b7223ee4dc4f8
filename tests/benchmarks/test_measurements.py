"""The benchmarks that measure time, on inputs so small that they take seconds. Covers: that they still run as their
pages say, and print a row for everything that they measure; with `-m matrix` those of the loss and of an update; that
the queue of one process packs rows as TransferQueue does. Not covered: what they measure; the benchmarks of other
pages, whose commands tests/claims parses.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_process.queue import LocalQueue
from tensordict import NonTensorStack
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

ROOT = Path(__file__).parents[2]

ROW = re.compile(r"^\| ([^|]+?) \| ([\d.]+) \| [\d.]+-[\d.]+ \| ([\d.]+) \|")

SMALL_MODEL = "--updates 2 --width 64 --layers 1 --sequences 4 --response 8"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        ("loss.py", "--shape 4x32 grpo", ["clipx_grpo, eager", "clipx_grpo, compiled"]),
        ("update_actor.py", SMALL_MODEL, ["acpo, lagged", "acpo, mini_batch"]),
    ],
)
def test_a_benchmark_prints_its_table(script, arguments, rows):
    found = {row[1]: float(row[3]) for row in map(ROW.match, output(script, *arguments.split()).splitlines()) if row}
    assert found["vanilla"] == 1
    assert [row for row in rows if found[row] > 0] == rows


@pytest.mark.slow
def test_the_benchmark_of_traces_prints_its_rows():
    rows = ["untraced", "25 % of the prompts", "clipx.metrics=all"]
    printed = output("trace.py").splitlines()
    assert [row for row in rows if any(line.startswith(row) for line in printed)] == rows


def output(script: str, *arguments: str) -> str:
    """What a benchmark prints of one measurement each."""
    command = [sys.executable, ROOT / "benchmarks" / script, "--repeats", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("lengths", [(3, 2), (3, 3)])
def test_rows_are_packed_as_transfer_queue_packs_them_also_rows_of_one_length_which_a_stack_would_fit(lengths):
    queue = LocalQueue()
    for key, length in zip("ab", lengths, strict=True):
        queue.rows[key] = {"mask": torch.ones(length), "step": torch.tensor(length), "text": "x" * length}
    rows = queue.kv_batch_get(["b", "a"])
    for name in ("mask", "step", "text"):
        theirs = AsyncSimpleStorageManager._pack_field_values([queue.rows[key][name] for key in "ba"])
        ours = rows.get(name)
        assert type(ours) is type(theirs)
        if isinstance(theirs, NonTensorStack):
            assert ours.tolist() == theirs.tolist()
        else:
            assert ours.is_nested == theirs.is_nested and ours.layout == theirs.layout
            assert [part.tolist() for part in ours.unbind()] == [part.tolist() for part in theirs.unbind()]
