"""Asks math-verify in processes of their own, which end at a limit of time and memory. Any thread may ask.

The processes end with the process that asks. If one is busy then, its alarm ends it, a second after the limit of time.
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

PROCESSES = 2
"""Processes for each process that asks. verl itself starts several reward workers."""

SECONDS = 5
"""Wall time that a question may take, from when a process takes it. Waiting for other questions does not count."""

MEMORY_BYTES = 1 << 30
"""Memory that a process may allocate beyond what it has mapped when it starts."""

# pebble's pools of processes by the id of the process that asks. A fork cannot use its parent's pool.
_pools: dict[int, Any] = {}


def _describe_parent(name: str) -> dict[str, Any]:
    """Return what a new process must know of this one, without the user's script.

    Args:
        name: the name of the new process.
    """
    description = spawn.get_preparation_data(name)
    return {key: value for key, value in description.items() if not key.startswith("init_main")}


def _copy_launch() -> FunctionType:
    """Return a copy of `popen_spawn_posix.Popen._launch` that calls `_describe_parent`.

    The original calls `spawn.get_preparation_data`, and Python has no option for another function.
    """
    names_of_spawn = {**vars(spawn), "get_preparation_data": _describe_parent}
    global_names = {**vars(popen_spawn_posix), "spawn": SimpleNamespace(**names_of_spawn)}
    return FunctionType(popen_spawn_posix.Popen._launch.__code__, global_names)


class _Popen(popen_spawn_posix.Popen):
    """Spawns processes that do not run the user's script.

    Python would run it again in each of them. A script without `if __name__ == "__main__":` would then start more
    processes.
    """

    _launch = _copy_launch()


class _Context(multiprocessing.context.SpawnContext):
    """Tells pebble to start its processes by `_Popen`."""

    class Process(multiprocessing.context.SpawnProcess):
        """A process that `_Popen` starts."""

        _Popen = staticmethod(_Popen)


def compare(pairs: tuple[tuple[str, str], ...], strict: bool) -> bool | None:
    """Return the verdict of `comparison.judge` on one question.

    Args:
        pairs, strict: as for `comparison.judge`.

    Returns:
        The verdict. None, too, if judging takes more than SECONDS or MEMORY_BYTES, or if its process dies.

    Raises:
        RuntimeError: no process can be started.
    """
    # Imported here, so that `equality` can say how to install it.
    from pebble import ProcessExpired

    # If the first pool is broken, a new one is asked.
    for _ in range(2):
        pool = _current_pool()
        try:
            return pool.schedule(_judge, args=(pairs, strict, SECONDS + 1), timeout=SECONDS).result()
        except (TimeoutError, ProcessExpired):
            return None
        except (BrokenExecutor, RuntimeError):
            _discard(pool)
    raise RuntimeError("no process for math-verify stays alive; standard error says why they ended")


def _current_pool() -> Any:
    """Return the pool of this process. If there is none, add a new one, which starts with its first question."""
    from pebble import ProcessPool

    pool = _pools.get(os.getpid())
    if pool is None:
        # Processes are spawned, because the fork of a process with threads may hang.
        new_pool = ProcessPool(PROCESSES, initializer=_prepare, context=_Context())
        # If another thread has added a pool meanwhile, that one is used, and the new one never starts.
        pool = _pools.setdefault(os.getpid(), new_pool)
    return pool


def _discard(pool: Any) -> None:
    """Remove a pool whose processes died while they were idle, unless another thread has removed it."""
    if _pools.get(os.getpid()) is pool:
        del _pools[os.getpid()]
        # This also takes the exit status of dead processes, which would otherwise remain as zombies.
        multiprocessing.active_children()


def _prepare() -> None:
    """Prepare a new process: load what judges, end its logging, and set its limits."""
    # This takes seconds, which must not count for the first question.
    import verl_clipx.papers.tasks.math.comparison  # noqa: F401

    logging.disable(logging.CRITICAL)
    # By default, an alarm ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    with contextlib.suppress(ValueError, OSError):  # not every platform bounds the address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _judge(pairs: tuple[tuple[str, str], ...], strict: bool, alarm: int) -> bool | None:
    """Return the verdict of `comparison.judge`, in one of the processes.

    Args:
        pairs, strict: as for `comparison.judge`.
        alarm: seconds after which the kernel ends the process. pebble ends it earlier, unless the process that asked
            has died.
    """
    from verl_clipx.papers.tasks.math.comparison import judge

    signal.alarm(alarm)
    try:
        return judge(pairs, strict)
    finally:
        signal.alarm(0)
