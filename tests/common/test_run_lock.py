"""The lock of a run's folder, between real processes.

Covers: a process that lives, one that was killed, one of another host, of the same cluster's job; a start that is
killed while it writes the lock; eight that start at once, each waiting for the one that looks; the number of an ended
process in use again; a wall clock that jumps. Not covered: two hosts at once, whose locks a shared file system keeps
apart; verl's door is in tests/driver/test_start.py.
"""

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_clipx.common import run_lock

HOLDER = """
import sys, time
from pathlib import Path
from verl_clipx.common.run_lock import FolderInUse, take
try:
    said = take(Path(sys.argv[1]))
except FolderInUse as error:
    print("refused:", error, flush=True)
else:
    print("taken:", said, flush=True)
    sys.stdin.read()
"""


class Other:
    """Another process that takes the lock and lives until it is told to end."""

    def __init__(self, lock):
        words = [sys.executable, "-c", HOLDER, str(lock)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(self):
        return self.process.stdout.readline()

    def end(self):
        self.process.communicate(timeout=30)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_held", set())
    yield tmp_path / "run" / "metrics.lock"
    run_lock.release()


def written(lock, **changes):
    """A lock as this process would write it, with changes."""
    lock.parent.mkdir()
    lock.write_text(json.dumps({**vars(run_lock.this_process()), **changes}))


def test_a_living_owner_keeps_its_lock_and_one_that_ends_releases_it(lock):
    other = Other(lock)
    assert other.said() == "taken: None\n"
    with pytest.raises(run_lock.FolderInUse, match=rf"process {other.process.pid} on .* end it \(kill"):
        run_lock.take(lock)
    other.end()
    assert not lock.exists()
    assert run_lock.take(lock) is None
    # The entry module's start and run_ppo's are one.
    assert run_lock.take(lock) is None
    run_lock.release()
    assert not lock.exists()


def test_a_killed_owners_lock_is_taken_over_and_said(lock):
    other = Other(lock)
    other.said()
    other.process.kill()
    # Not yet waited for: a zombie is no run either.
    deadline = time.monotonic() + 30
    while run_lock.start_of(other.process.pid) is not None:
        assert time.monotonic() < deadline
    assert f"was left by process {other.process.pid} on" in run_lock.take(lock)
    other.process.communicate()
    assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_later_process_of_the_owners_number_is_not_the_owner(lock):
    written(lock, pid=os.getppid(), started="another/1")
    assert "which has ended" in run_lock.take(lock)


def test_another_hosts_lock_stops_with_what_to_do(lock):
    written(lock, host="node7")
    with pytest.raises(run_lock.FolderInUse, match=r"on node7.*If it has ended, remove the file.*default_local_dir"):
        run_lock.take(lock)


def test_a_start_of_the_same_job_goes_on_on_another_host(lock, monkeypatch):
    written(lock, host="node7", job="slurm-12")
    monkeypatch.setenv("CLIPX_JOB", "slurm-13")
    with pytest.raises(run_lock.FolderInUse):
        run_lock.take(lock)
    monkeypatch.setenv("CLIPX_JOB", "slurm-12")
    assert "an earlier start of job slurm-12" in run_lock.take(lock)


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_lock_that_was_cut_off_is_nobodys(lock, share):
    written(lock)
    content = lock.read_text()
    lock.write_text(content[: int(share * len(content))])
    said = run_lock.take(lock)
    assert said is None if share == 0 else "names no process" in said
    assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_of_eight_that_start_at_once_one_goes_on(lock):
    lock.parent.mkdir()
    written_by_the_dead = {"host": run_lock.this_process().host, "pid": 1, "started": "", "at": "", "job": ""}
    lock.write_text(json.dumps(written_by_the_dead))
    others = [Other(lock) for _ in range(8)]
    said = [other.said() for other in others]
    assert sum(line.startswith("taken:") for line in said) == 1, said
    for other in others:
        other.end()


def test_a_start_waits_while_another_one_looks(lock):
    lock.parent.mkdir()
    lock.touch()
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = Other(lock)
        # Until the system lists it as waiting, or it has said something.
        while (
            not (waits := waits_for_a_lock(other.process.pid))
            and not select.select([other.process.stdout], [], [], 0.01)[0]
        ):
            pass
        assert waits
    assert other.said() == "taken: None\n"
    other.end()


def waits_for_a_lock(pid):
    """Whether a process waits for a file's lock, by proc_locks(5)."""
    return any(f"-> FLOCK  ADVISORY  WRITE {pid} " in line for line in Path("/proc/locks").read_text().splitlines())


def test_no_setting_of_the_clock_makes_an_owner_another(monkeypatch):
    before = run_lock.this_process()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr("psutil.boot_time", lambda: 12345.0)
    assert run_lock.this_process().started == before.started


def test_what_another_process_released_is_not_removed_again(lock):
    run_lock.take(lock)
    lock.unlink()
    other = Other(lock)
    other.said()
    run_lock.release()
    assert json.loads(lock.read_text())["pid"] == other.process.pid
    other.end()
