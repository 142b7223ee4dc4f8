"""Ends a process when the one that started it is killed: python with_parent.py COMMAND …

SIGKILL leaves a launcher no time to end what it runs. On Linux, the end of the parent, of whatever kind, becomes a
SIGTERM to the process that asked for it; elsewhere nothing happens. This is for launchers that outlive what they run: a
command whose shell ends normally before it, as under nohup, must not ask.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask for SIGTERM when this process's parent ends; a program that this process executes next inherits that."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
