"""Runs a command in the background of a progress display: its noise goes to a log, its children end with it."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_clipx.diagnostics.run_log import last_step, read_run_log

MARK = "VERL_CLIPX_RUN_ID"
SECONDS_TO_END = 15


def marked_processes(mark: str) -> list[psutil.Process]:
    """The living processes whose environment carries the mark: a run's children, Ray's daemons among them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end_marked_processes(mark: str) -> None:
    """Ends a run's processes: politely, then by force."""
    for end, seconds in ((psutil.Process.terminate, SECONDS_TO_END), (psutil.Process.kill, SECONDS_TO_END)):
        processes = marked_processes(mark)
        for process in processes:
            try:
                end(process)
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=seconds)


def run_watched(command: Sequence[str], *, steps: int, metrics: Path, log: Path, label: str) -> int:
    """Runs a training command under a progress bar.

    Whatever way it ends, an interrupt included, none of its processes is left.

    Args:
        command: the program and its arguments.
        steps: training steps that it will make.
        metrics: verl's file log, which the progress is read from.
        log: where its output goes.
        label: what to call it.

    Returns:
        The command's exit code; 130 after an interrupt.
    """
    mark = uuid.uuid4().hex
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
        try:
            with Progress(*columns, console=console, refresh_per_second=2) as progress:
                task = progress.add_task(f"{label}: starting Ray, verl and the policy", total=steps)
                while process.poll() is None:
                    time.sleep(1)
                    show(progress, task, metrics, label)
                show(progress, task, metrics, label)
            return process.returncode
        except KeyboardInterrupt:
            console.print(f"{label}: interrupted; ending its processes")
            return 130
        finally:
            end_marked_processes(mark)
            signal.signal(signal.SIGTERM, previous)


def show(progress: Progress, task, metrics: Path, label: str) -> None:
    """Puts the last step and its reward into the progress bar."""
    step = last_step(metrics)
    if step == 0:
        return
    rewards = read_run_log(metrics).get("critic/score/mean")
    recent = "" if rewards is None else f", reward {rewards.dropna().tail(10).mean():.2f}"
    progress.update(task, completed=step, description=f"{label}{recent}")
