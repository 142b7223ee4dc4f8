"""Cleans up after a process that is killed: python session_guard.py SESSION NAME VALUE FOLDER.

The process that runs it holds the other end of this one's standard input. SIGKILL gives it no time to end anything, but
closes that end: every process of the session is then killed, and every one whose environment has NAME=VALUE, in
whatever session; then FOLDER is removed. A byte on the standard input says that nothing is left to clean up.
"""

import contextlib
import os
import shutil
import sys

import psutil


def end_members(session: int, name: str, value: str) -> None:
    """Kill every process of a session, and every one with a value in its environment, until none is left."""
    while members := members_of(session, name, value):
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        psutil.wait_procs(members, timeout=1)


def members_of(session: int, name: str, value: str) -> list[psutil.Process]:
    """Return the living processes of a session or with a value in their environment."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            is_member = os.getsid(process.pid) == session or process.environ().get(name) == value
            if is_member and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


if __name__ == "__main__":
    session, name, value, folder = int(sys.argv[1]), *sys.argv[2:5]
    if not sys.stdin.buffer.read(1):
        end_members(session, name, value)
        shutil.rmtree(folder, ignore_errors=True)
