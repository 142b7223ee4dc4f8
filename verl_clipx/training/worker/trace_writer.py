"""A thread that writes traces, so that training never waits for the disk and a disk error never stops a run."""

import atexit
import logging
import queue
import threading
from collections.abc import Callable

from verl_clipx.training.observing import Part

logger = logging.getLogger(__name__)

# The bytes that unfinished jobs may hold in the host's memory. A job beyond this is dropped.
CAPACITY = 1 << 30
# The most seconds that a checkpoint, the end of a run or the end of a process waits for the disk.
PATIENCE = 10.0


class TraceWriter:
    """Does jobs in order in its own thread.

    A job for which there is no room is dropped; one larger than all room (`capacity`, in bytes) waits for nothing else.
    After a job has failed, `part`, by default one of its own, is off, and no other is accepted.
    """

    def __init__(self, capacity: int = CAPACITY, part: Part | None = None):
        self.dropped, self.part = 0, part or Part("the traces")
        self._capacity, self._held, self._lock = capacity, 0, threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], int]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="clipx-trace", daemon=True).start()
        atexit.register(self.close)

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """Adds a job that holds some bytes until it is done, without waiting."""
        if self.part.off:
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
        """Waits until all jobs so far are done, but at most some seconds; whether they are."""
        done = threading.Event()
        self._jobs.put((done.set, 0))
        return done.wait(seconds)

    def close(self) -> None:
        """Flushes, and warns how many jobs were dropped."""
        self.flush()
        if self.dropped:
            logger.warning(DROPPED, self.dropped)
            self.dropped = 0

    def _work(self) -> None:
        while True:
            job, size = self._jobs.get()
            try:
                job()
            except Exception:
                if not self.part.off:
                    self.part.fail()
            # Without this name, the job's memory is freed.
            del job
            with self._lock:
                self._held -= size


FULL = (
    "clipx.trace: the disk is slower than the training: %.0f MB are waiting to be written. Updates are not traced "
    "until there is room again."
)
DROPPED = "clipx.trace: %d updates were not traced, because the disk was slower than the training."
