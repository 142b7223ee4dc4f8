"""A thread that writes traces, so that training never waits for the disk and a disk error never stops a run."""

import atexit
import logging
import queue
import threading
from collections.abc import Callable

from verl_clipx.training.observing import Observers

logger = logging.getLogger(__name__)

# The bytes that unfinished jobs may hold in the host's memory. A job beyond this is dropped.
CAPACITY = 1 << 30
# The most seconds that a checkpoint, the end of a run or the end of a process waits for the disk.
PATIENCE = 10.0
# The name of the traces among what observes a run, for the message of a failure.
TRACES = "the traces"


class TraceWriter:
    """Does jobs in order in a thread of its own.

    A job for which there is no room is dropped. A job that alone is larger than `capacity` is accepted only while no
    other unfinished job holds memory. After a job has failed, the traces are off: further jobs are ignored, and those
    that are queued already are still tried.

    Building a writer starts its thread, and registers `close` for the end of the process.

    Args:
        capacity: the most bytes that unfinished jobs may hold.
        observers: the observers of this process, in which a failure switches the traces off; None: the writer makes its
            own.
    """

    def __init__(self, capacity: int = CAPACITY, observers: Observers | None = None):
        # How many jobs were dropped since `close` last warned of them.
        self.dropped = 0
        self._observers = Observers() if observers is None else observers
        self._capacity = capacity
        # Of all unfinished jobs. Both threads change it, under the lock.
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], int]] = queue.SimpleQueue()
        threading.Thread(target=self._do_jobs, name="clipx-trace", daemon=True).start()
        atexit.register(self.close)

    @property
    def is_off(self) -> bool:
        """Return whether the traces are off."""
        return TRACES in self._observers.off

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """Queue a job without waiting, or drop it if there is no room.

        Args:
            job: called in the writer's thread.
            size: the bytes that the job holds until it is done.
        """
        if self.is_off:
            return
        with self._lock:
            fits = size == 0 or self._held_bytes == 0 or self._held_bytes + size <= self._capacity
            if fits:
                self._held_bytes += size
        if fits:
            self._jobs.put((job, size))
            return
        if self.dropped == 0:
            logger.warning(FULL, self._held_bytes / 1e6)
        self.dropped += 1

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Wait until all jobs so far are done, but at most `seconds`, and warn if some are not.

        Returns:
            Whether all jobs are done.
        """
        is_done = threading.Event()
        self._jobs.put((is_done.set, 0))
        if is_done.wait(seconds):
            return True
        logger.warning(NOT_WRITTEN, seconds, self._held_bytes / 1e6)
        return False

    def close(self) -> None:
        """Wait for the jobs so far as `flush` does, and warn if any were dropped. The writer can still be used."""
        self.flush()
        if self.dropped > 0:
            logger.warning(DROPPED, self.dropped)
            self.dropped = 0

    def _do_jobs(self) -> None:
        """Do the jobs one after the other, without end. Runs in the writer's thread."""
        while True:
            job, size = self._jobs.get()
            try:
                job()
            except Exception:
                if not self.is_off:
                    self._observers.fail(TRACES)
            # Frees the job's memory before the next job arrives.
            del job
            with self._lock:
                self._held_bytes -= size


FULL = (
    "clipx.trace: the disk is slower than the training: %.0f MB are waiting to be written. Updates are not traced "
    "until there is room again."
)
NOT_WRITTEN = (
    "clipx.trace: after %g s the disk has not written all traces: %.0f MB are waiting. Traces that are not written "
    "when the process ends are lost."
)
DROPPED = "clipx.trace: %d updates were not traced, because the disk was slower than the training."
