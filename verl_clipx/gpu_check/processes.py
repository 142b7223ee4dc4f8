"""Ending what a check has started."""

import subprocess
from contextlib import suppress

import psutil


def end(process: subprocess.Popen) -> None:
    """Ends a process at once, with all that it has started and that has not outlived it."""
    with suppress(psutil.NoSuchProcess):
        # Ray's processes are sessions of their own, so that no process group holds them all.
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
