"""The benchmarks that measure time, on inputs so small that they take seconds.

Covers: that they still run as their pages say, and print a row for everything that they measure.
Not covered: what they measure; the benchmarks of other pages, whose commands tests/claims parses.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROW = re.compile(r"^\| ([^|]+?) \|(?: [\d.]*%? \|)? ([\d.]+) \| [\d.]+-[\d.]+ \| ([\d.]+) \|")

SMALL_MODEL = "--updates 2 --width 64 --layers 1 --sequences 4 --response 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        ("loss.py", "--shape 4x32 grpo", ["clipx_grpo, eager", "clipx_grpo, compiled"]),
        (
            "update_actor.py",
            f"{SMALL_MODEL} --precision 0.3",
            ["acpo, lagged", "acpo, mini_batch", "acpo, precision 0.3"],
        ),
    ],
)
def test_a_benchmark_prints_its_rows(script, arguments, rows):
    command = [sys.executable, ROOT / "benchmarks" / script, "--repeats", "1", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {row[1]: (float(row[2]), float(row[3])) for row in map(ROW.match, done.stdout.splitlines()) if row}
    assert float(found["vanilla"][1]) == 1
    assert [row for row in rows if found[row][1] > 0] == rows
