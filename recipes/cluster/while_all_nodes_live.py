"""Runs a command on a Ray cluster until it ends or the cluster loses a node: while_all_nodes_live.py COMMAND …

verl may wait forever for something that a lost node held. The exit code is the command's, or 75 (EX_TEMPFAIL) if a node
was lost, even if the command has failed because of that by itself. With all nodes back, the same command can continue.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

LOST_NODE = 75
# Ray notices an ended node at once, an unreachable one after some health checks.
SECONDS_TO_NOTICE = 30
SECONDS_TO_END = 30
# Where this process is killed, what it runs gets a SIGTERM.
WITH_PARENT = (sys.executable, str(Path(__file__).resolve().parents[2] / "verl_clipx" / "common" / "with_parent.py"))


def run(command: Sequence[str], watch: Sequence[str]) -> int:
    """Runs a command beside another one that ends with 0 when a node is lost.

    Args:
        command: what to run.
        watch: the other one; if it fails, nothing watches over the command.

    Returns:
        The exit code.
    """
    watcher = subprocess.Popen([*WITH_PARENT, *watch], stdin=subprocess.DEVNULL)
    running = subprocess.Popen([*WITH_PARENT, *command])
    try:
        while running.poll() is None and watcher.poll() is None:
            time.sleep(0.2)
        if running.poll() is None and watcher.returncode == 0:
            print(
                "a node was lost, so the run is ended; with all nodes back, it continues from its checkpoint",
                file=sys.stderr,
            )
            return LOST_NODE
        if watcher.poll():
            print(
                f"nothing watches for lost nodes any more, because the watcher ended with {watcher.returncode}",
                file=sys.stderr,
            )
        if running.wait() != 0 and _ends_with_0(watcher):
            print(f"a node was lost, and the run failed with {running.returncode}", file=sys.stderr)
            return LOST_NODE
        # As a shell does with a signal's number.
        return running.returncode if running.returncode >= 0 else 128 - running.returncode
    finally:
        end_trees(running, watcher)


def _ends_with_0(watcher: subprocess.Popen) -> bool:
    try:
        return watcher.wait(SECONDS_TO_NOTICE) == 0
    except subprocess.TimeoutExpired:
        return False


def end_trees(*roots: subprocess.Popen, seconds: float = SECONDS_TO_END) -> None:
    """Ends processes with all that they have started: with SIGTERM, and SIGKILL for those that stay.

    Args:
        *roots: the processes; those that have ended are left out.
        seconds: between the two signals.
    """
    found = []
    for root in roots:
        if root.poll() is None:
            process = psutil.Process(root.pid)
            found += [process, *process.children(recursive=True)]
    for process in found:
        _send(process, signal.SIGTERM)
    _, staying = psutil.wait_procs(found, timeout=seconds)
    for process in staying:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(staying, timeout=seconds)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def end_with_the_command(number: int, _: object) -> NoReturn:
    """Handles a signal: `finally` in `run` ends the command, which no second signal cuts short."""
    for other in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # What starts out ignored, as under nohup, stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_with_the_command)
    script = Path(__file__).with_name("wait_for_lost_node.py")
    sys.exit(run(sys.argv[1:], [sys.executable, str(script)]))
