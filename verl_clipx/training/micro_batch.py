"""What the worker knows of the micro-batch at hand and verl's policy-loss signature does not carry."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass
class MicroBatch:
    """One micro-batch inside a training worker's loss call.

    Args:
        rollout_log_prob: the rollout policy's log-probabilities, (sequences, response length), padded; None if the
            rollout did not return them.
        sums: filled by the loss: metric name to a sum over this micro-batch's tokens.
        values: filled by the loss: metric name to a value that is not a sum over tokens.
    """

    rollout_log_prob: torch.Tensor | None = None
    sums: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


_current: ContextVar[MicroBatch | None] = ContextVar("verl_clipx_micro_batch", default=None)


def current_micro_batch() -> MicroBatch | None:
    """The micro-batch whose loss is being computed; None outside a training worker."""
    return _current.get()


@contextmanager
def in_micro_batch(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Makes a micro-batch the current one for the duration of the block."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)
