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
TRACES = "the traces"


class TraceWriter:
    """Does jobs in order in its own thread.

    A job for which there is no room is dropped; one larger than all room (`capacity`, in bytes) waits for nothing else.
    After a job has failed, the traces are off, and no other is accepted.

    Args:
        observers: those of the process; None: its own.
    """

    def __init__(self, capacity: int = CAPACITY, observers: Observers | None = None):
        self.dropped = 0
        self._observers = Observers() if observers is None else observers
        self._capacity = capacity
        self._held = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], int]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="clipx-trace", daemon=True).start()
        atexit.register(self.close)

    @property
    def is_off(self) -> bool:
        """Returns whether the traces are off."""
        return TRACES in self._observers.off

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """Adds a job that holds some bytes until it is done, without waiting."""
        if self.is_off:
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
        """Waits until all jobs so far are done, but at most some seconds; returns whether they are."""
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
        """Does the jobs one after the other, without end; runs in the writer's thread."""
        while True:
            job, size = self._jobs.get()
            try:
                job()
            except Exception:
                if not self.is_off:
                    self._observers.fail(TRACES)
            # Without this name, the job's memory is freed.
            del job
            with self._lock:
                self._held -= size


FULL = (
    "clipx.trace: the disk is slower than the training: %.0f MB are waiting to be written. Updates are not traced "
    "until there is room again."
)
DROPPED = "clipx.trace: %d updates were not traced, because the disk was slower than the training."
