"""A rollout batch as the worker's observers see it, for tests that call them without a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_clipx.worker.step import Observer, RolloutBatch


@contextmanager
def rollout_batch(observer: Observer, data: Any, before: int = 0) -> Iterator[None]:
    """Begins and ends a rollout batch around the block; `before` is how many verl counted earlier."""
    batch = RolloutBatch(before)
    observer.begin_rollout_batch(data, batch)
    yield
    observer.end_rollout_batch(batch)
