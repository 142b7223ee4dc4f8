"""A thread that writes traces, so that training waits for no disk and no fault of it stops a run."""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Jobs that wait; a further one is dropped.
CAPACITY = 32
# Seconds that a checkpoint, the end of a run and that of a process wait for the disk, at most.
PATIENCE = 10.0


class TraceWriter:
    """Does jobs in their order in a thread of its own.

    Where the queue is full a job is dropped, and after one that failed no other is taken; a warning says so once.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.dropped = 0
        self.failed = False
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(capacity)
        threading.Thread(target=self._work, name="clipx-trace", daemon=True).start()
        atexit.register(self.close)

    def put(self, job: Callable[[], object]) -> None:
        """Hands over a job and never waits."""
        if self.failed:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            if not self.dropped:
                logger.warning(FULL, self._jobs.maxsize)
            self.dropped += 1

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Waits until the jobs so far are done, but no longer than some seconds.

        Returns:
            Whether they are.
        """
        done, deadline = threading.Event(), time.monotonic() + seconds
        try:
            self._jobs.put(done.set, timeout=seconds)
        except queue.Full:
            return False
        return done.wait(max(deadline - time.monotonic(), 0))

    def close(self) -> None:
        """As `flush`, and says how many jobs were dropped."""
        self.flush()
        if self.dropped:
            logger.warning(DROPPED, self.dropped)
            self.dropped = 0

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as error:
                if not self.failed:
                    logger.warning(FAILED, type(error).__name__, error)
                self.failed = True


FULL = "clipx.trace: the disk is slower than the training: %d updates wait to be written, further ones are not traced."
DROPPED = "clipx.trace: %d updates were not traced, because the disk was slower than the training."
FAILED = "clipx.trace: nothing more is traced by this process, and the training goes on: %s: %s"
