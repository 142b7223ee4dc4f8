"""Asks math-verify in processes of their own, which end at a limit of time and memory. Any thread may ask.

They end when what asks them ends; the kernel ends one that is busy then, a second after the limit.
"""

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
from concurrent.futures import BrokenExecutor, TimeoutError
from multiprocessing import popen_spawn_posix, spawn
from types import FunctionType, SimpleNamespace
from typing import Any

import psutil

PROCESSES = 2  # for each process that asks; verl itself starts several reward workers
SECONDS = 5  # of wall time, from when a process has taken the question: other questions cost no verdict
MEMORY_BYTES = 1 << 30  # that a process may allocate beyond what it has mapped when it starts

# pebble's pools by process id: a fork cannot use its parent's.
_pools: dict[int, Any] = {}


def _describe_parent(name: str) -> dict[str, Any]:
    """Return what a new process must know of this one, but not the user's script."""
    return {key: value for key, value in spawn.get_preparation_data(name).items() if not key.startswith("init_main")}


class _Popen(popen_spawn_posix.Popen):
    # Spawned processes would otherwise run the user's script again, which starts more of them if it has no
    # `if __name__ == "__main__":`. Python has no option for that; this is its function with one other name in it.
    _spawn = SimpleNamespace(**vars(spawn) | {"get_preparation_data": _describe_parent})
    _launch = FunctionType(popen_spawn_posix.Popen._launch.__code__, vars(popen_spawn_posix) | {"spawn": _spawn})


class _Context(multiprocessing.context.SpawnContext):
    class Process(multiprocessing.context.SpawnProcess):
        _Popen = staticmethod(_Popen)


def compare(pairs: tuple[tuple[str, str], ...], both_ways: bool) -> bool | None:
    """Return what `comparison.judge` does; None also if it took more than SECONDS or MEMORY_BYTES.

    Raises:
        RuntimeError: no process can be started.
    """
    # Imported here, so that `equality` can say how to install it.
    from pebble import ProcessExpired, ProcessPool

    for _ in range(2):
        # Forks of a process with threads may hang.
        pool = _pools.get(os.getpid()) or _pools.setdefault(
            os.getpid(),
            ProcessPool(PROCESSES, initializer=_prepare, context=_Context()),
        )
        try:
            return pool.schedule(_judge, args=(pairs, both_ways, SECONDS + 1), timeout=SECONDS).result()
        except (TimeoutError, ProcessExpired):
            return None
        except (BrokenExecutor, RuntimeError):
            # Its processes died while they were idle. Whoever notices first takes a new pool, and reaps them.
            if _pools.get(os.getpid()) is pool:
                del _pools[os.getpid()]
                multiprocessing.active_children()
    raise RuntimeError("no process for math-verify stays alive; standard error says why they ended")


def _prepare() -> None:
    # This takes seconds, which must not count for the first question.
    import verl_clipx.papers.tasks.math.comparison  # noqa: F401

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    with contextlib.suppress(ValueError, OSError):  # not every platform bounds the address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _judge(pairs: tuple[tuple[str, str], ...], both_ways: bool, alarm: int) -> bool | None:
    from verl_clipx.papers.tasks.math.comparison import judge

    signal.alarm(alarm)
    try:
        return judge(pairs, both_ways)
    finally:
        signal.alarm(0)
