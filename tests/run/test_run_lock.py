"""The lock of a run's log, between real processes. Not covered: two hosts, whose locks a shared file system keeps
apart; where a run takes it (tests/run/test_start.py).
"""

import contextlib
import errno
import fcntl
import signal
import subprocess
import sys

import pytest

from verl_clipx.run import run_lock
from verl_clipx.run.run_lock import FolderInUse, is_held, release, take_lock

# Holds the lock, leaves a process of its own behind as Ray's daemons would be, and waits.
HOLD_LOCK = """
import subprocess, sys
from pathlib import Path
from verl_clipx.run.run_lock import take_lock
take_lock(Path(sys.argv[1]))
subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path):
    yield tmp_path / "run" / "metrics.lock"
    release()


@pytest.fixture
def holder(lock):
    command = [sys.executable, "-c", HOLD_LOCK, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_while_another_process_holds_it_a_run_waits_and_then_names_the_switch(lock, holder, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "PATIENCE", 1.5)
    assert is_held(lock)
    with pytest.raises(FolderInUse, match=rf"{lock}: another run .* for 1\.5 s\. .*clipx\.log=false"):
        take_lock(lock)
    assert capsys.readouterr().out == f"clipx: {lock}: another run writes this log; waiting for its end up to 1.5 s\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process_and_no_child_keeps_it(lock, holder, monkeypatch, number):
    waits = []

    def end_holder_instead_of_sleeping(seconds):
        waits.append(seconds)
        holder.send_signal(number)
        holder.wait()

    monkeypatch.setattr(run_lock.time, "sleep", end_holder_instead_of_sleeping)
    assert take_lock(lock) and waits == [1]
    # Nobody removes or renames its file: two would then hold two.
    assert lock.exists() and is_held(lock)


def test_the_same_process_may_take_it_again_and_give_it_up(lock):
    assert not is_held(lock) and take_lock(lock) and take_lock(lock) and is_held(lock)
    release()
    assert not is_held(lock) and lock.exists() and take_lock(lock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_said_and_another_error_is_one(lock, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError) if number == errno.EIO else contextlib.nullcontext():
        assert not take_lock(lock)
    # Whether a run goes on there cannot be said, so it may.
    assert is_held(lock)
