"""Comparison processes with a hard deadline, usable from any thread.

A process that hangs is killed and replaced, and only its own comparison goes without a verdict. Started by exec, not by
`multiprocessing`: nothing re-imports the caller's main module, daemonic processes may have them, and no tracker process
is left over. A process ends when its standard input closes, so none outlives its parent, however that one ends.
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

from verl_clipx.tasks.math.worker import READY

# Of each process that compares answers. verl starts several reward workers of its own.
POOL_SIZE = 2

# Wall time of one question: the process ends itself before, by processor time, unless the machine is busy.
DEADLINE_SECONDS = 5.0

# Importing math-verify takes 0.3 s, on a busy machine with a cold disk far more.
START_SECONDS = 120.0

_VERDICTS = {b"1\n": True, b"0\n": False, b"-\n": None}

WORKER = Path(__file__).with_name("worker.py")


class WorkerPool:
    """At most `size` comparison processes, started when needed.

    Args:
        size: number of processes, at least 1.
        deadline: wall time of one question in seconds, after which its process is killed.
        script: what a process runs; it answers as worker.py does.
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
            pairs: right answers, each with the given one: LaTeX that `guards.is_safe` accepts.
            both_ways: also compare with the roles exchanged, and require both; math-verify is not symmetric.

        Returns:
            The verdict; None if no pair is equal and one could not be read as a whole, if all pairs together exceeded
            their time or memory, or if the pool is closed. The time runs while a process works on the question, not
            while others keep it busy: a right answer is not lost to what else is asked.

        Raises:
            RuntimeError: if no comparison process can be started.
        """
        request = json.dumps([list(pairs), both_ways]).encode() + b"\n"
        worker = self._slots.get()
        seconds = self._deadline
        try:
            # A process may have died while idle, or of what earlier comparisons left behind: ask a new one, once.
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
            # Interrupted in between: an answer that arrives later would be taken for the next one's.
            if worker is not None:
                self._discard(worker)
                worker = None
            raise
        finally:
            self._slots.put(worker)

    def process_ids(self) -> list[int]:
        """Return the ids of the processes that run, in ascending order."""
        return sorted(worker.process.pid for worker in self._workers.copy())

    def close(self) -> None:
        """Kill and reap every process; comparisons that run or come later have no verdict."""
        self._closed = True
        for worker in self._workers.copy():
            worker.process.kill()
            worker.process.wait()
        self._workers.clear()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's processes, which would otherwise outlive it."""
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
    """One process and its two pipes; used by one thread at a time."""

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
        """Return the line that answers a request, or nothing if the process ended or had to be killed."""
        try:
            # Bounded by guards.MAX_LENGTH and reward.MAX_ALTERNATIVES, it fits a pipe's buffer: writing never waits.
            self.process.stdin.write(request)
        except OSError:
            return b""
        return self.read_line(deadline)

    def read_line(self, seconds: float) -> bytes:
        """Return the next line, or nothing if the process ends first or has not written one in time."""
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
        """Kill and reap the process; return whether it had run out of time."""
        self.process.kill()
        status = self.process.wait()
        self._close_pipes()
        return self._killed or status == -signal.SIGPROF

    def abandon(self) -> None:
        """Close this process's copies of the pipes and forget a process that is not its child."""
        self._close_pipes()
        self.process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


_lock = threading.Lock()
_shared: WorkerPool | None = None


def shared_pool() -> WorkerPool:
    """Return this process's own pool; a forked child has one of its own."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = WorkerPool()
            atexit.register(_close_shared)
        return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget_shared() -> None:
    global _lock, _shared
    _lock = threading.Lock()
    if _shared is not None:
        _shared.abandon()
        _shared = None


os.register_at_fork(after_in_child=_forget_shared)
