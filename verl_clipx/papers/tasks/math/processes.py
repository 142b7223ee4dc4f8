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
from typing import Any

import psutil

PROCESSES = 2  # for each process that asks; verl itself starts several reward workers
SECONDS = 5  # of wall time, from when a process has taken the question: other questions cost no verdict
MEMORY_BYTES = 1 << 30  # that a process may allocate beyond what it has mapped when it starts

# pebble's pools by process id: a fork cannot use its parent's.
_pools: dict[int, Any] = {}


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
            ProcessPool(PROCESSES, initializer=_prepare, context=multiprocessing.get_context("spawn")),
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
