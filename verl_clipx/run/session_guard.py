"""Cleans up after the process that started it: python session_guard.py SESSION NAME VALUE FOLDER.

That process holds the other end of the standard input. If it is killed, even by SIGKILL, that end is closed. The guard
then kills every process of the session SESSION and every process with NAME=VALUE in its environment, and removes
FOLDER. If a byte comes by the standard input, nothing is left to clean up, and the guard ends.
"""

import contextlib
import os
import shutil
import sys

import psutil


def end_members(session: int, name: str, value: str) -> None:
    """Kill every process of a session, and every other one with NAME=VALUE in its environment, until none is left."""
    while members := members_of(session, name, value):
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        psutil.wait_procs(members, timeout=1)


def members_of(session: int, name: str, value: str) -> list[psutil.Process]:
    """Return the living processes that are in a session, or have NAME=VALUE in their environment.

    Args:
        session: the session's id.
        name, value: the variable and its value.
    """
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            is_member = os.getsid(process.pid) == session or process.environ().get(name) == value
            if is_member and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


if __name__ == "__main__":
    _, session_id, name, value, folder = sys.argv
    # Nothing is read if the other end was closed.
    if not sys.stdin.buffer.read(1):
        end_members(int(session_id), name, value)
        shutil.rmtree(folder, ignore_errors=True)
