"""A watched command: its exit code and output, and that none of its processes is left.

Covers: interrupts; sessions of their own; orphans and what they start. Not covered: what the progress bar looks like, a
process that is born and orphaned between two looks.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.diagnostics.watch import Descendants, run_watched


def pid_in(path):
    """The process id that a command writes; waits for it."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no process id in {path}"
        time.sleep(0.05)
    return int(path.read_text())


def lives(pid):
    """Whether there is such a process, zombies left out."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "zombie" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_watched_commands_exit_code_and_output(tmp_path):
    command = [sys.executable, "-c", "print('noise'); raise SystemExit(3)"]
    log = tmp_path / "run.log"
    assert run_watched(command, steps=1, metrics=tmp_path / "metrics.jsonl", log=log, label="test") == 3
    assert log.read_text() == "noise\n"


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"nonsense\n", b"[" * 100_000 + b"\n", None])
def test_a_log_that_cannot_be_read_ends_no_training(tmp_path, content):
    metrics = tmp_path / "metrics.jsonl"
    metrics.mkdir() if content is None else metrics.write_bytes(content)
    command = [sys.executable, "-c", "print('to the end')"]
    assert run_watched(command, steps=1, metrics=metrics, log=tmp_path / "run.log", label="test") == 0
    assert (tmp_path / "run.log").read_text() == "to the end\n"


def test_a_command_that_is_not_there_ends_with_one_line(tmp_path):
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--steps", "1", "--", "no-such-command"])
    assert done.exit_code == 127 and isinstance(done.exception, SystemExit)
    assert "training could not start: [Errno 2]" in done.output and "no-such-command" in done.output
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "file"), "--steps", "1", "--", "true"])
    assert done.exit_code == 127 and "file" in done.output


SLEEPER = """
import subprocess, sys, time
# A grandchild in a session of its own, as Ray's daemons are.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env={})
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_processes(tmp_path, sent):
    pid_file = tmp_path / "pid"
    watcher = subprocess.Popen([*WATCH, str(tmp_path), *SLEEPS, str(pid_file)])
    grandchild = pid_in(pid_file)
    time.sleep(2)
    watcher.send_signal(sent)
    assert watcher.wait(timeout=60) == 130
    time.sleep(0.2)
    assert not lives(grandchild)


@pytest.mark.slow
def test_a_killed_watcher_ends_its_command(tmp_path):
    pid_file = tmp_path / "pid"
    watcher = subprocess.Popen([*WATCH, str(tmp_path), *SLEEPS[:-1], SLOW_TO_END, str(pid_file)])
    child = pid_in(pid_file)
    watcher.kill()
    watcher.wait()
    deadline = time.monotonic() + 30
    while lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_closed_terminal_leaves_no_processes(tmp_path):
    """Its hang-up goes to the watcher; what it writes to then is gone as well."""
    pid_file, (terminal, side) = tmp_path / "pid", pty.openpty()
    watcher = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *WATCH, str(tmp_path), *SLEEPS, str(pid_file)],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    grandchild = pid_in(pid_file)
    time.sleep(2)
    os.close(terminal)
    assert watcher.wait(timeout=60) != 0
    time.sleep(0.2)
    assert not lives(grandchild)


@pytest.mark.slow
def test_under_nohup_the_training_outlives_the_terminal(tmp_path):
    pid_file = tmp_path / "pid"
    watcher = subprocess.Popen(["nohup", *WATCH, str(tmp_path), *SLEEPS, str(pid_file)], stderr=subprocess.DEVNULL)
    grandchild = pid_in(pid_file)
    watcher.send_signal(signal.SIGHUP)
    time.sleep(2)
    assert watcher.poll() is None and lives(grandchild)
    watcher.terminate()
    assert watcher.wait(timeout=60) == 130 and not lives(grandchild)


@pytest.mark.slow
def test_a_second_signal_does_not_cut_the_end_short(tmp_path):
    """As at Ctrl-C, which a terminal sends to the quick start and to the watcher, and the quick start hands on."""
    pid_file = tmp_path / "pid"
    watcher = subprocess.Popen([*WATCH, str(tmp_path), *SLEEPS[:-1], SLOW_TO_END, str(pid_file)])
    child = pid_in(pid_file)
    time.sleep(1)
    watcher.send_signal(signal.SIGINT)
    time.sleep(1)
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(timeout=60) == 130 and not lives(child)


SLOW_TO_END = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), sys.exit()))
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
WATCH = [sys.executable, "-m", "verl_clipx.cli", "watch"]
SLEEPS = ["--steps", "5", "--", sys.executable, "-c", SLEEPER]
# Makes standard input the terminal of this session, as a login does.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


ORPHAN = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
def give_birth(*_):
    child = subprocess.Popen(sleep, start_new_session=True)
    (folder / "child").write_text(f"{child.pid}\\n")
signal.signal(signal.SIGUSR1, give_birth)
(folder / "orphan").write_text(f"{os.getpid()}\\n")
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_that_an_orphan_starts_is_found(tmp_path):
    program = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True); input()"
    orphan_command = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    root = subprocess.Popen([sys.executable, "-c", program, *orphan_command], stdin=subprocess.PIPE)
    descendants = Descendants(root.pid)
    orphan = pid_in(tmp_path / "orphan")
    descendants.look()
    root.kill()
    root.wait()
    assert lives(orphan)

    psutil.Process(orphan).send_signal(signal.SIGUSR1)
    child = pid_in(tmp_path / "child")
    assert lives(child)
    descendants.end()
    assert not lives(orphan) and not lives(child)
