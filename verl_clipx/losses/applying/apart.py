"""Measures the difference of a gradient from the announced one, for the receipt and `check_gradient`."""

import torch
from torch import Tensor

# How far two gradients may differ, relative to a token's, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01
# How far rounding may move log_prob, in nats. A token closer to a bound may have the gradient of either side.
ROUNDING = 1e-6


def apart(gradient: Tensor, announced: Tensor, at_ratio_1: Tensor, besides: Tensor) -> Tensor:
    """The difference of each token's gradient from the announced one, relative to that, of any shape.

    It is infinite where a gradient is not finite although all that is announced is, and 0 if that is not either.

    Args:
        announced: what is announced with log_prob as it is, and moved by `ROUNDING` up and down: 3 of that shape.
        at_ratio_1: what would be announced at F = 1.
        besides: the gradient of other terms of the loss.
    """
    limits = torch.finfo(gradient.dtype)
    size = torch.stack([announced[0], besides, LEAST * at_ratio_1]).abs().amax(0).clamp(min=limits.smallest_normal)
    sides = (announced + besides).clamp(-limits.max, limits.max)
    difference = torch.maximum(sides.amin(0) - gradient, gradient - sides.amax(0)).clamp(min=0) / size
    known = bool(sides.isfinite().all())
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf) if known else torch.zeros_like(difference)
