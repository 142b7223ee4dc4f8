"""Ends a process with everything that it has started."""

import time
from contextlib import suppress

import psutil


def kill_tree(pid: int, seconds: float = 60) -> None:
    """Kills a process and all its descendants with SIGKILL, and waits until they are gone.

    They are stopped before the first is killed: a process that still runs could start others meanwhile, as Ray's node
    manager does with workers, and a killed one's children could no longer be found.

    Raises:
        TimeoutError: processes that are still there after so many seconds.
    """
    stopped: list[psutil.Process] = []
    while found := [process for process in _tree(pid) if process not in stopped]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped += found
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + seconds
    while left := [process for process in stopped if _alive(process)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there {seconds} s after SIGKILL: {left}")
        time.sleep(0.05)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        # A zombie has ended; only its parent has not asked for its exit code.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
