"""Reads what verl's engine does not report on every rank: the norm of an optimizer step's gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_clipx.worker.step import OptimizerStep


@contextmanager
def gradient_norm_kept(engine: Any, step: OptimizerStep) -> Iterator[None]:
    """Keeps in the step, on every rank, the norm of the gradient with which the engine takes it within the block.

    Metrics have the norm only on ranks with outputs, but every rank must know whether the step was taken.

    Args:
        engine: verl's engine; as before after the block.
    """
    take = engine.optimizer_step

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        norm = take(*args, **kwargs)
        step.gradient_norm = None if norm is None else float(norm)
        return norm

    own = vars(engine).get("optimizer_step")
    engine.optimizer_step = optimizer_step
    try:
        yield
    finally:
        if own is None:
            del engine.optimizer_step
        else:
            engine.optimizer_step = own
