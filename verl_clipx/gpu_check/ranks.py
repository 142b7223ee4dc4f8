"""Starts the ranks, collects what they find, and starts them again after a check that ended them."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from verl_clipx.common.files import last_lines, read_json
from verl_clipx.gpu_check.engine import rank_environment
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.rank import file_of, write_task
from verl_clipx.gpu_check.report import Measured, Result, result_of

PROGRAM = (sys.executable, "-m", "verl_clipx.gpu_check.rank")
# Time limit of one check. That of the first includes the start of the ranks.
SECONDS = 300
POLL_SECONDS = 0.05
LOG_LINES = 30


def end(process: subprocess.Popen) -> None:
    """Kill a process and its descendants."""
    with suppress(psutil.NoSuchProcess):
        # Ray starts processes in sessions of their own, so no process group contains them all.
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


class Ranks:
    """The ranks' processes: a context manager that kills them at its end."""

    def __init__(self, machine: Machine, models: Path, names: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory(prefix="clipx-gpu-check-")
        self._processes: list[subprocess.Popen] = []
        self.folder = Path(self._folder.name)
        write_task(self.folder, machine, models, names)
        for rank in range(machine.ranks):
            with self._log(rank).open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*PROGRAM, str(self.folder)],
                        env=os.environ | rank_environment(machine, rank, self.folder),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            end(process)
        self._folder.cleanup()

    def result_of(self, name: str, seconds: float) -> tuple[Result, bool]:
        """Wait for a check.

        Returns:
            Its result, and whether the ranks go on to the next check.
        """
        started = time.monotonic()
        while True:
            ended = [process.poll() for process in self._processes]
            found = [read_json(path) for path in self.folder.glob(file_of(Path(), name, "*").name)]
            passed = time.monotonic() - started
            errors = [one["error"] for one in found if "error" in one]
            if found and not errors:
                return result_of(name, Measured(**found[0]), passed), True
            codes = [code for code in ended if code]
            if not errors and codes:
                errors = [f"a rank ended with exit code {codes[0]}"]
            if not errors and passed > seconds:
                errors = [f"no answer within {seconds:.0f} s"]
            if errors:
                return Result(name, "fail", sorted(errors)[0], seconds=passed, log=self._last_lines()), False
            time.sleep(POLL_SECONDS)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _last_lines(self) -> tuple[str, ...]:
        lines = []
        for rank in range(len(self._processes)):
            lines += [f"rank {rank}: {line}" for line in last_lines(self._log(rank), LOG_LINES)]
        return tuple(lines)


def results_on_ranks(
    machine: Machine, models: Path, names: Sequence[str], seconds: float = SECONDS
) -> Iterator[Result]:
    """Run checks on the ranks, one after the other; yields each result as soon as it is known.

    Args:
        seconds: time limit of one check.
    """
    waiting = list(names)
    while waiting:
        with Ranks(machine, models, waiting) as ranks:
            going = True
            while waiting and going:
                result, going = ranks.result_of(waiting.pop(0), seconds)
                yield result
