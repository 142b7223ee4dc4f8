"""One run at a time in a run's folder: a file that names the process which owns the run's log or checkpoints."""

import atexit
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import psutil

from verl_clipx.common.files import read_bytes

# By this variable a launcher names its cluster job. Starts of one job never overlap: each begins after the last ended.
JOB_VARIABLE = "CLIPX_JOB"


class FolderInUse(RuntimeError):
    """Another run has the folder, or may have it; the message says which and what to do."""


@dataclass(frozen=True)
class Owner:
    """The process that a lock belongs to.

    Args:
        started: when it started, to tell it from a later process of that number; no time of day, since clocks jump.
        at: when it took the lock, for people to read.
        job: the cluster's job, from CLIPX_JOB; empty if there is none.
    """

    host: str
    pid: int
    started: str
    at: str
    job: str = ""

    @property
    def named(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}, since {self.at}"


def this_process() -> Owner:
    """This process as an owner."""
    pid = os.getpid()
    at = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Owner(socket.gethostname(), pid, start_of(pid) or "", at, os.environ.get(JOB_VARIABLE, ""))


def start_of(pid: int) -> str | None:
    """When a process of this host started, in a form that no setting of the clock changes; None if it has ended."""
    try:
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # The state, and the start in ticks since the machine started; see proc(5).
        state, ticks = fields_after_name[0], fields_after_name[19]
        return None if state in "ZX" else f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{ticks}"
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    # This is not Linux.
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def take(path: Path) -> str | None:
    """Makes this process the owner of a lock, until `release` or its end.

    Args:
        path: the lock; its folder is made if missing.

    Returns:
        What became of the previous owner, if that one had not released the lock; otherwise None.

    Raises:
        FolderInUse: a living process of this host has it, or any process of another host.
        OSError: the file cannot be written, in a read-only folder for instance.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    me, said = this_process(), None
    with _only_one(path) as file:
        content = file.read()
        before = _owner(content)
        if before is not None and (before.host, before.pid, before.started) == (me.host, me.pid, me.started):
            return None
        if before is None:
            said = f"{path} names no process, because its owner was killed while writing it" if content else None
        elif before.host == me.host and start_of(before.pid) == before.started:
            raise FolderInUse(f"{path}: a run is going on here ({before.named}). {WAIT.format(pid=before.pid)}")
        elif before.host == me.host:
            said = f"{path} was left by {before.named}, which has ended"
        elif before.job and before.job == me.job:
            said = f"{path} was left by an earlier start of job {me.job} ({before.named})"
        else:
            raise FolderInUse(f"{path}: a run of another host has this folder ({before.named}). {ELSEWHERE}")
        file.seek(0)
        file.truncate()
        file.write(json.dumps(asdict(me)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if not _held:
        atexit.register(release)
    _held.add(path)
    return said


def is_held(path: Path) -> bool:
    """Whether a run holds a lock; one of another host, which cannot be seen from here, does until the file is gone."""
    try:
        owner = _owner(read_bytes(path))
    except FileNotFoundError:
        return False
    return owner is not None and (owner.host != socket.gethostname() or start_of(owner.pid) == owner.started)


def release() -> None:
    """Removes the locks that this process took."""
    for path in sorted(_held):
        # A folder that is gone has no lock.
        with contextlib.suppress(OSError), _only_one(path) as file:
            owner, me = _owner(file.read()), this_process()
            if owner is not None and (owner.pid, owner.started) == (me.pid, me.started):
                path.unlink()
    _held.clear()


_held: set[Path] = set()


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[BinaryIO]:
    """The lock's open file, which no other process of this host reads or writes in the meantime."""
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
            # Some file systems of clusters have no locks; then two runs that start in the same instant may both go on.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                same = False
            # Otherwise another process removed the file between the two calls.
            if same:
                yield file
                return


def _owner(content: bytes) -> Owner | None:
    """The owner that a lock's content names; None if the content is not whole."""
    try:
        found = json.loads(content)
        given = {field.name: found[field.name] for field in fields(Owner)}
    except (ValueError, TypeError, KeyError):
        return None
    return Owner(**given) if all(type(given[field.name]) is field.type for field in fields(Owner)) else None


WAIT = (
    "Wait until it ends, end it (kill {pid}), or give this run its own folder: VERL_FILE_LOGGER_PATH for the log, "
    "trainer.default_local_dir for the checkpoints."
)
ELSEWHERE = (
    "It cannot be seen from here whether that run is alive. If it has ended, remove the file and start again. If it "
    "has not, give this run its own folder: VERL_FILE_LOGGER_PATH for the log, trainer.default_local_dir for the "
    "checkpoints."
)
