"""How the processes of a command that is explained start and end, where no test through the command line gets:
processes of other users, a guard that can't start, a program that can't. Not covered: loops and the answers
(test_explain_command.py).
"""

import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from verl_clipx.run import explain
from verl_clipx.run.explain import EXPLAIN, Session, WaitingLoop, run_session

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def run_sleep(tmp_path) -> Callable[[], int]:
    """Runs a command that sleeps for a minute, as `clipx explain` runs a command."""

    def run(words=tuple(SLEEP)) -> int:
        return run_session(
            words,
            environment={EXPLAIN: str(tmp_path / "answers")},
            output=tmp_path / "output",
            is_done=lambda: True,
            notes=tmp_path / "notes",
            loop=WaitingLoop(tmp_path / "answers", tmp_path / "record", tmp_path / "last_command"),
        )

    return run


def test_a_process_of_another_user_does_not_keep_the_end_waiting(monkeypatch, tmp_path):
    process = subprocess.Popen(SLEEP, start_new_session=True)

    def refuse(self: psutil.Process) -> None:
        # The command itself ends, so that the session's own wait for it is over.
        process.kill()
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "kill", refuse)
    session = Session(
        process,
        tmp_path / "answers",
        tmp_path / "notes",
        WaitingLoop(tmp_path / "answers", tmp_path / "record", tmp_path / "last_command"),
    )
    # Seen again and again, as a process that cannot be killed would be.
    monkeypatch.setattr(explain, "find_processes", lambda condition: [psutil.Process()])
    session.kill()
    assert process.returncode is not None


def test_a_command_is_killed_if_its_guard_cannot_start(monkeypatch, run_sleep):
    started = []

    def fail(session: int, answers) -> subprocess.Popen:
        started.append(psutil.Process(session))
        raise OSError("no memory")

    monkeypatch.setattr(explain, "guard_session", fail)
    with pytest.raises(OSError, match="no memory"):
        run_sleep()
    (command,) = started
    assert not command.is_running()


def test_a_program_that_cannot_be_executed_is_named(tmp_path, run_sleep):
    (tmp_path / "train.sh").write_text("echo")
    with pytest.raises(ValueError, match=r"train\.sh: Permission denied"):
        run_sleep([str(tmp_path / "train.sh")])
