"""Observes what verl's engine does not report on every rank: the norm of an optimizer step's gradient."""

from collections.abc import Mapping
from typing import Any


class EngineWatch:
    """Observes one engine's optimizer steps.

    Args:
        engine: verl's engine; its optimizer_step is wrapped.

    Attributes:
        gradient_norm: the norm of the latest optimizer step's gradient, on every rank; None before the first step.
    """

    def __init__(self, engine: Any):
        self.gradient_norm: float | None = None
        step = engine.optimizer_step

        def optimizer_step(*args, **kwargs):
            # Metrics have the norm only on ranks with outputs, but every rank must know whether the step was taken.
            norm = step(*args, **kwargs)
            self.gradient_norm = None if norm is None else float(norm)
            return norm

        engine.optimizer_step = optimizer_step


def computes_in_half_precision(config: Any) -> bool:
    """Whether an engine computes in half precision; `config` is verl's, whose default is bfloat16."""
    precision = getattr(config, "mixed_precision", None)
    dtype = precision.get("param_dtype", "bf16") if isinstance(precision, Mapping) else "bf16"
    return str(dtype) not in ("fp32", "float32", "32")
