"""What verl's engine does without reporting it: a gradient's norm, and which weights gave log-probabilities."""

from collections.abc import Callable
from typing import Any

import torch

# Elements of a parameter that its part of a fingerprint is made of: an update moves some of them.
FINGERPRINT_ELEMENTS = 4096
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(modules: Any) -> torch.Tensor:
    """A number for each trained parameter's values on this rank, which other values would hardly have: int64.

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
    """Looks on at one engine's optimizer steps and passes without gradient.

    Args:
        engine: verl's engine; the watch wraps its optimizer_step and infer_batch.
        wanted: whether the weights behind the log-probabilities of the pass that just ended will be asked for.

    Attributes:
        gradient_norm: of the latest optimizer step, on every rank; None before it.
        weights_of_log_probs: fingerprint of the weights of the latest such pass; None without one.
    """

    def __init__(self, engine: Any, wanted: Callable[[], bool]):
        self._engine = engine
        self.gradient_norm: float | None = None
        self.weights_of_log_probs: torch.Tensor | None = None
        step, infer = engine.optimizer_step, engine.infer_batch

        def optimizer_step(*args, **kwargs):
            # The norm reaches the metrics only on ranks with outputs; every rank has to know whether it was taken.
            norm = step(*args, **kwargs)
            self.gradient_norm = None if norm is None else float(norm)
            return norm

        def infer_batch(*args, **kwargs):
            output = infer(*args, **kwargs)
            # Here, because around it verl may have offloaded the weights.
            if wanted():
                self.weights_of_log_probs = fingerprint(engine.module)
            return output

        engine.optimizer_step, engine.infer_batch = optimizer_step, infer_batch

    def weights_moved(self) -> torch.Tensor | None:
        """Whether the weights are others than those that gave the log-probabilities, 0-d bool; None if not known."""
        if self.weights_of_log_probs is None:
            return None
        return (fingerprint(self._engine.module) != self.weights_of_log_probs).any()
