"""Observes what verl's engine does not report: a gradient's norm, and which weights computed log-probabilities."""

from collections.abc import Callable
from typing import Any

import torch

# How many elements of a parameter make its part of a fingerprint. An update moves at least some of them.
FINGERPRINT_ELEMENTS = 4096
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(modules: Any) -> torch.Tensor:
    """A checksum of each trained parameter's values on this rank, int64, (parameters,).

    Args:
        modules: the engine's model, or a list of its parts, with its weights loaded.
    """
    sums = []
    for model in modules if isinstance(modules, list | tuple) else [modules]:
        for parameter in model.parameters():
            if parameter.requires_grad:
                # FSDP2's shard, FSDP1's, or the parameter itself.
                local = getattr(parameter, "_local_tensor", getattr(parameter, "_local_shard", parameter)).detach()
                bits = local.reshape(-1)[:FINGERPRINT_ELEMENTS].view(BITS[local.element_size()])
                sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)


class EngineWatch:
    """Observes one engine's optimizer steps and passes without gradient.

    Args:
        engine: verl's engine; its optimizer_step and infer_batch are wrapped.
        wanted: returns whether the fingerprint of the pass that just ended will be needed.

    Attributes:
        gradient_norm: the norm of the latest optimizer step's gradient, on every rank; None before the first step.
        weights_of_log_probs: the fingerprint of the weights in the latest pass without gradient, or None.
    """

    def __init__(self, engine: Any, wanted: Callable[[], bool]):
        self._engine = engine
        self.gradient_norm: float | None = None
        self.weights_of_log_probs: torch.Tensor | None = None
        step, infer = engine.optimizer_step, engine.infer_batch

        def optimizer_step(*args, **kwargs):
            # Metrics have the norm only on ranks with outputs, but every rank must know whether the step was taken.
            norm = step(*args, **kwargs)
            self.gradient_norm = None if norm is None else float(norm)
            return norm

        def infer_batch(*args, **kwargs):
            output = infer(*args, **kwargs)
            # Taken here, because outside this call verl may have offloaded the weights.
            if wanted():
                self.weights_of_log_probs = fingerprint(engine.module)
            return output

        engine.optimizer_step, engine.infer_batch = optimizer_step, infer_batch

    def weights_moved(self) -> torch.Tensor | None:
        """Whether the weights differ from those that computed the log-probabilities, 0-d bool; None if unknown."""
        if self.weights_of_log_probs is None:
            return None
        return (fingerprint(self._engine.module) != self.weights_of_log_probs).any()
