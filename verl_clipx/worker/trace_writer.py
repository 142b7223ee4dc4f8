"""A thread that writes traces, so that training never waits for a disk and a disk's fault never stops a run."""

import atexit
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Bytes that jobs which wait or are being done hold in the host's memory; a job beyond them is dropped.
CAPACITY = 1 << 30
# Seconds that a checkpoint, the end of a run and that of a process wait for the disk, at most.
PATIENCE = 10.0


class TraceWriter:
    """Does jobs in their order in a thread of its own.

    A job for which there is no room is dropped, and after one that failed no other is taken; a warning says so once.

    Args:
        capacity: bytes that jobs may hold together; a larger job is taken where no other holds any.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.dropped = 0
        self.failed = False
        self._capacity, self._held, self._lock = capacity, 0, threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], int]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="clipx-trace", daemon=True).start()
        atexit.register(self.close)

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """Hands over a job and never waits.

        Args:
            job: what to do.
            size: bytes that it holds until it is done.
        """
        if self.failed:
            return
        with self._lock:
            fits = size == 0 or self._held == 0 or self._held + size <= self._capacity
            self._held += size * fits
        if fits:
            self._jobs.put((job, size))
            return
        if not self.dropped:
            logger.warning(FULL, self._held / 1e6)
        self.dropped += 1

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Waits until the jobs so far are done, but no longer than some seconds.

        Returns:
            Whether they are.
        """
        done = threading.Event()
        self._jobs.put((done.set, 0))
        return done.wait(seconds)

    def close(self) -> None:
        """As `flush`, and says how many jobs were dropped."""
        self.flush()
        if self.dropped:
            logger.warning(DROPPED, self.dropped)
            self.dropped = 0

    def _work(self) -> None:
        while True:
            job, size = self._jobs.get()
            try:
                job()
            except Exception as error:
                if not self.failed:
                    logger.warning(FAILED, type(error).__name__, error)
                self.failed = True
            # What it holds is free once nothing names it.
            del job
            with self._lock:
                self._held -= size


FULL = (
    "clipx.trace: the disk is slower than the training: %.0f MB are waiting to be written. Further updates are not "
    "traced."
)
DROPPED = "clipx.trace: %d updates were not traced, because the disk was slower than the training."
FAILED = "clipx.trace: nothing more is traced by this process, and the training goes on: %s: %s"
