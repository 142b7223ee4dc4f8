"""One run at a time writes a log: its driver holds the file system's lock on a file beside it."""

import errno
import fcntl
import os
import time
from pathlib import Path

# How long a start waits for a lock: a driver that was killed may need a minute to end, and with it its lock.
PATIENCE = 90.0

# The errors of a file system without locks, as some clusters have.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# The descriptors of the locked files of this process, by their paths.
_held: dict[Path, int] = {}


class FolderInUse(RuntimeError):
    """Another run holds the lock. The message names the lock's file, and says what to do."""


def take_lock(path: Path) -> bool:
    """Take a lock on a file, which lasts until `release` or the end of this process. The file stays.

    Args:
        path: the file; it is created with its folder if it does not exist.

    Returns:
        Whether this process holds the lock; False where the file system cannot lock files.

    Raises:
        FolderInUse: another process held it for `PATIENCE` seconds.
        OSError: the file cannot be written, in a read-only folder for instance.
    """
    if path in _held:
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + PATIENCE
    has_said_so = False
    try:
        while not _lock(file):
            if time.monotonic() > deadline:
                raise FolderInUse(BUSY.format(path=path, patience=PATIENCE))
            if not has_said_so:
                print(WAITS.format(path=path, patience=PATIENCE), flush=True)
                has_said_so = True
            time.sleep(1)
        _held[path] = file
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        if path not in _held:
            os.close(file)
    return path in _held


def is_held(path: Path) -> bool:
    """Return whether a run holds the lock on a file; False if there is no file, True if this cannot be found out."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH)
    except OSError:
        # The file system has no locks.
        return True
    finally:
        os.close(file)


def release() -> None:
    """Give up the locks of this process."""
    while _held:
        os.close(_held.popitem()[1])


def _lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    # Returns at once: whether this process now has the lock.
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


WAITS = "clipx: {path}: another run writes this log; waiting for its end up to {patience:g} s"
BUSY = (
    "{path}: another run has been writing this log for {patience:g} s. Wait until it ends, or end it; or give this run "
    "its own folder (VERL_FILE_LOGGER_PATH or trainer.default_local_dir); or keep no log of it: clipx.log=false."
)
