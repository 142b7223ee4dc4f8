"""A run that is killed at any write of its files, and started again, has the files of one that was not.

Covers: SIGKILL before each opening, renaming and removing of a file, and in the middle of each file at every tenth byte
of the log and its record, every hundredth of the traces; what `kills.py` says a run writes. Byte by byte equal: log,
record, traces, validations, state. Not covered: verl's own checkpoints (tests/end_to_end), a machine that loses power.
"""

import json
import subprocess
import sys

import pytest


def kills(folder, every):
    """Makes one of so many kills; returns what became of each that happened."""
    words = [sys.executable, "-m", "tests.diagnostics.kills", str(folder), str(every)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"where"')]
    assert {result["where"] for result in results} == {
        "all parts, events",
        "log and record, bytes",
        "traces, bytes",
        "validations, bytes",
        "state, bytes",
    }
    killed = [result for result in results if result["code"] < 0]
    # The others came to their end before the fault.
    assert all(result["code"] == 0 for result in results if result not in killed)
    return killed


def check(killed):
    assert [one for one in killed if not one["kept"]] == [], "lines of the steps before were in no file"
    assert [one for one in killed if one["again"] != 0] == [], "the next start failed"
    assert [one for one in killed if one["different"]] == [], "files differ from those of an uninterrupted run"


@pytest.mark.slow
def test_some_kills_change_nothing(tmp_path):
    killed = kills(tmp_path, 16)
    assert len(killed) >= 30
    check(killed)


@pytest.mark.slow
@pytest.mark.matrix
def test_500_kills_change_nothing(tmp_path):
    killed = kills(tmp_path, 1)
    assert len(killed) >= 500
    check(killed)
