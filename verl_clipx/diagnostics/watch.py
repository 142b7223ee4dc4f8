"""Runs a command under a progress bar: its output goes to a log, and all its processes end with it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy
import pandas
import psutil
from rich.progress import Progress

from verl_clipx.common.command_line import progress_bar
from verl_clipx.common.statistics.collapse import collapse
from verl_clipx.common.terminal import TerminalConsole
from verl_clipx.common.with_parent import end_with_parent
from verl_clipx.diagnostics import keys
from verl_clipx.diagnostics.run_log import SkippedUpdates, not_finite_in, read_growing_rows, skipped_updates, table_of

SECONDS_TO_END = 15


class Descendants:
    """Every process that a process has started, including those that outlive their parents.

    Ray's daemons start sessions of their own, and its workers overwrite their environment when they rename themselves,
    so neither a process group nor a mark in the environment finds them all: the tree is looked at while it exists.
    """

    def __init__(self, root: int):
        self.root = psutil.Process(root)
        self.seen: set[psutil.Process] = {self.root}

    def look(self) -> None:
        """Remembers the processes that exist now, including those below orphans."""
        # One pass over the machine's processes; psutil's own children() would make one for each process in the tree.
        children: dict[int, list[psutil.Process]] = {}
        standing = []
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
            # is_running tells a process from a later one with its number.
            if process in self.seen and process.is_running():
                standing.append(process)
        while standing:
            found = set(children.get(standing.pop().pid, ())) - self.seen
            self.seen |= found
            standing += found

    def end(self) -> None:
        """Ends them all: first with SIGTERM, then with SIGKILL."""
        for end in (psutil.Process.terminate, psutil.Process.kill):
            self.look()
            living = [process for process in self.seen if process.is_running()]
            for process in living:
                with contextlib.suppress(psutil.Error):
                    end(process)
            psutil.wait_procs(living, timeout=SECONDS_TO_END)


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a watched command: an interrupt, a request to end, the end of the terminal.

    SIGINT does even if it is ignored at the start, as in a background job of a shell; SIGHUP then does not, as under
    nohup.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


def run_watched(command: Sequence[str], *, steps: int, metrics: Path, log: Path, label: str) -> int:
    """Runs a training command under a progress bar.

    However it ends, also by an interrupt, none of its processes is left. If this process is killed, the command gets a
    SIGTERM.

    Args:
        command: the words of the command.
        steps: training steps that it will make.
        metrics: verl's file log, from which the progress is read.
        log: file for the command's output.
        label: what the progress bar calls the run.

    Returns:
        The command's exit code; 130 after an interrupt.
    """
    interrupted = False

    def interrupt(*_) -> None:
        nonlocal interrupted
        # A second signal, for instance from a shell that passes the terminal's on, must not cut the clean-up short.
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in ending_signals()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        descendants = Descendants(process.pid)
        try:
            with progress_bar() as progress:
                task = progress.add_task(f"{label}: starting Ray, verl and the policy", total=steps)
                size = 0
                while process.poll() is None:
                    time.sleep(1)
                    descendants.look()
                    if metrics.is_file() and metrics.stat().st_size != size:
                        size = metrics.stat().st_size
                        show(progress, task, metrics, label)
                show(progress, task, metrics, label)
            return process.returncode
        except KeyboardInterrupt:
            TerminalConsole(stderr=True).print(f"{label}: interrupted; ending its processes", markup=False)
            return 130
        finally:
            descendants.end()
            for number, handler in previous.items():
                signal.signal(number, handler)


def show(progress: Progress, task, metrics: Path, label: str) -> None:
    """Puts the last step and its reward into the progress bar; a log that cannot be read does not end the training."""
    try:
        rows = read_growing_rows(metrics)
    except (OSError, ValueError) as error:
        progress.update(task, description=f"{label}, no progress known: {error}")
        return
    log = table_of(rows)
    if log.empty or log.index[-1] == 0:
        return
    told = f"{recent_reward(log)}{collapsed(log)}{skipped(skipped_updates(log, not_finite_in(rows)))}"
    progress.update(task, completed=int(log.index[-1]), description=f"{label}{told}")


def recent_reward(log: pandas.DataFrame) -> str:
    """The mean reward of the last ten steps whose reward is finite; nothing where the log has none."""
    rewards = log.get(keys.REWARD, pandas.Series(dtype=float))
    finite = rewards[numpy.isfinite(rewards)]
    if len(finite):
        return f", reward {finite.tail(10).mean():.2f}"
    return ", reward not finite" if len(rewards) else ""


def collapsed(log: pandas.DataFrame) -> str:
    """The step from which the reward had collapsed, as an addition to a run's name."""
    rewards = log.get(keys.REWARD, pandas.Series(dtype=float))
    finite = rewards[numpy.isfinite(rewards) & (rewards.index > 0)]
    at = collapse(finite.to_numpy())
    return "" if at is None else f", collapsed at step {finite.index[at]}"


def skipped(found: SkippedUpdates | None) -> str:
    """The updates that were skipped since their first, as an addition to a run's name."""
    if found is None:
        return ""
    if found.updates is None:
        return f", updates skipped in {found.steps} of {found.trained} steps since step {found.first}"
    return f", {found.updates} update{'' if found.updates == 1 else 's'} skipped since step {found.first}"
