"""Runs a command and stays the ancestor of every process that comes from it: python subreaper.py COMMAND …

Ray's workers would go to init when their raylet is killed, and could not be found to be ended. Here they come to this
process (Linux), which ends when the last one has ended, with the command's exit code.
"""

import ctypes
import os
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36

if __name__ == "__main__":
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    command = subprocess.Popen(sys.argv[1:])
    code = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            sys.exit(code)
        if pid == command.pid:
            code = os.waitstatus_to_exitcode(status)
