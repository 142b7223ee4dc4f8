"""Runs comparisons in processes with a hard deadline. It can be used from any thread.

A process that hangs is killed and replaced, and only its own comparison gets no verdict. Processes are started as
programs, not by `multiprocessing`: nothing then imports the caller's main module again, daemonic processes may start
them too, and no tracker process is left over. A process ends when its standard input closes, so none outlives its
parent, however the parent ends.
"""

import atexit
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from verl_clipx.papers.tasks.math.worker import READY

# Number of comparison processes per process that compares answers. verl itself starts several reward workers.
POOL_SIZE = 2

# Wall time limit of one question. Unless the machine is busy, the process ends itself earlier, by processor time.
DEADLINE_SECONDS = 5.0

# Importing math-verify takes 0.3 s, but far longer on a busy machine with a cold disk.
START_SECONDS = 120.0

_VERDICTS = {b"1\n": True, b"0\n": False, b"-\n": None}

WORKER = Path(__file__).with_name("worker.py")


class WorkerPool:
    """At most `size` comparison processes, which are started when they are needed.

    Args:
        size: largest number of processes, at least 1.
        deadline: wall time of one question in seconds, after which its process is killed.
        script: the program that a process runs; it answers as worker.py does.

    Raises:
        ValueError: `size` is below 1.
    """

    def __init__(self, size: int = POOL_SIZE, deadline: float = DEADLINE_SECONDS, script: Path = WORKER) -> None:
        if size < 1:
            raise ValueError(f"size={size!r} is below 1; a pool needs at least one process")
        self._deadline = deadline
        self._script = script
        self._closed = False
        self._workers: set[_Worker] = set()
        # Last in, first out: a running process is taken before an empty slot.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def compare(self, pairs: Sequence[tuple[str, str]], both_ways: bool = False) -> bool | None:
        """Ask math-verify whether any of some pairs of answers is equal.

        Args:
            pairs: pairs of a right and a given answer, in LaTeX that `guards.is_safe` accepts.
            both_ways: whether to compare also with the roles exchanged, and to require equality both times, since
                math-verify is not symmetric.

        Returns:
            The verdict. None if no pair is equal and one could not be read completely, if all pairs together exceeded
            their time or memory, or if the pool is closed. Time counts only while a process works on this question, so
            that a right answer is not lost because of other questions.

        Raises:
            RuntimeError: if no comparison process can be started.
        """
        request = json.dumps([list(pairs), both_ways]).encode() + b"\n"
        worker = self._slots.get()
        seconds = self._deadline
        try:
            # A process may have died while idle, or because of earlier comparisons. If so, a new one is asked, once.
            for _ in range(2):
                if self._closed:
                    return None
                if worker is None:
                    worker = self._start()
                asked = time.monotonic()
                reply = worker.ask(request, seconds)
                if reply:
                    return _VERDICTS[reply]
                out_of_time = self._discard(worker)
                worker = None
                seconds -= time.monotonic() - asked
                if out_of_time or seconds <= 0:
                    return None
            return None
        except BaseException:
            # After an interruption, a late answer would be mistaken for that of the next question.
            if worker is not None:
                self._discard(worker)
                worker = None
            raise
        finally:
            self._slots.put(worker)

    def process_ids(self) -> list[int]:
        """Return the ids of the running processes, in ascending order."""
        return sorted(worker.process.pid for worker in self._workers.copy())

    def close(self) -> None:
        """Kill and reap every process. Running and later comparisons get no verdict."""
        self._closed = True
        for worker in self._workers.copy():
            worker.process.kill()
            worker.process.wait()
        self._workers.clear()

    def abandon(self) -> None:
        """Release the parent's processes in a forked child, which would otherwise keep them alive."""
        for worker in self._workers:
            worker.abandon()
        self._workers.clear()

    def _start(self) -> "_Worker":
        worker = _Worker(self._script)
        self._workers.add(worker)
        try:
            ready = worker.read_line(START_SECONDS) == READY
        except BaseException:
            self._discard(worker)
            raise
        if not ready:
            self._discard(worker)
            raise RuntimeError(
                f"a comparison process ({sys.executable} {self._script}) did not start; run that command to see why "
                "(it should print 'ready'), and check that math-verify is installed: pip install 'verl-clipx[tools]'"
            )
        return worker

    def _discard(self, worker: "_Worker") -> bool:
        self._workers.discard(worker)
        return worker.stop()


class _Worker:
    """A process and its two pipes, used by one thread at a time."""

    def __init__(self, script: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._killed = False

    def ask(self, request: bytes, deadline: float) -> bytes:
        """Return the line that answers a request; empty if the process ended or had to be killed."""
        try:
            # guards.MAX_LENGTH and reward.MAX_ALTERNATIVES bound it: it fits a pipe's buffer, so writing never waits.
            self.process.stdin.write(request)
        except OSError:
            return b""
        return self.read_line(deadline)

    def read_line(self, seconds: float) -> bytes:
        """Return the next line; empty if the process ends before that or does not write one in time."""
        output = self.process.stdout.fileno()
        poll = select.poll()  # unlike select.select, not limited to descriptors below 1024
        poll.register(output, select.POLLIN)
        end = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                self.process.kill()
                self._killed = True
                return b""
            chunk = os.read(output, 64)
            if not chunk:
                return b""
            line += chunk
        return line

    def stop(self) -> bool:
        """Kill and reap the process, and return whether it had run out of time."""
        self.process.kill()
        status = self.process.wait()
        self._close_pipes()
        return self._killed or status == -signal.SIGPROF

    def abandon(self) -> None:
        """Close a forked child's copies of the pipes, and forget the process, which is not its own child."""
        self._close_pipes()
        self.process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


_lock = threading.Lock()
_shared: WorkerPool | None = None


def shared_pool() -> WorkerPool:
    """Return the pool of this process; a forked child has its own."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = WorkerPool()
            atexit.register(_shared.close)
        return _shared


def _forget_shared() -> None:
    global _lock, _shared
    _lock = threading.Lock()
    if _shared is not None:
        _shared.abandon()
        _shared = None


os.register_at_fork(after_in_child=_forget_shared)
