"""Has a process end when the one that started it is killed: python with_parent.py COMMAND …

SIGKILL leaves a launcher no time to end what it runs. Where Linux watches over the parent, its end, of whatever kind,
becomes a SIGTERM to the process that asked; elsewhere nothing happens. It is for a launcher that outlives what it runs:
a command behind which a shell ends normally, as under nohup, must not ask.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Asks for SIGTERM at the end of this process's parent; what it executes next inherits that.

    Args:
        parent: its process id, where the caller knows it; it may have ended before.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
