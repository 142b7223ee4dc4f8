"""Measures the difference of a gradient from the announced one, for the receipt and `check_gradient`."""

import math

import torch
from torch import Tensor

# How far two gradients may differ, relative to a token's, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01
# How far rounding may move log_prob, in nats. A token closer to a bound may have the gradient of either side.
ROUNDING = 1e-6


def apart(gradient: Tensor, announced: Tensor, at_ratio_1: Tensor, besides: Tensor) -> Tensor:
    """Return the difference of each token's gradient from the announced one, relative to that, of any shape.

    It is NaN where what is announced is not finite, because nothing is known there, and infinite where only the
    gradient is not finite.

    Args:
        announced: what is announced with log_prob as it is, and moved by `ROUNDING` up and down: 3 of that shape.
        at_ratio_1: what would be announced at F = 1.
        besides: the gradient of other terms of the loss.
    """
    limits = torch.finfo(gradient.dtype)
    known = announced.isfinite().all(0) & besides.isfinite()
    parts = torch.stack([announced[0], besides, LEAST * at_ratio_1.nan_to_num(nan=0.0)])
    size = parts.abs().amax(0).clamp(limits.smallest_normal, limits.max)
    # The gradient may be of a narrower dtype, in which what overflows becomes its largest number.
    sides = (announced + besides).clamp(-limits.max, limits.max)
    difference = torch.maximum(sides.amin(0) - gradient, gradient - sides.amax(0)).clamp(min=0) / size
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).where(known, torch.nan)


def largest_known(differences: Tensor) -> float:
    """Return the largest of the differences that `apart` returns; NaN if none is known."""
    known = differences[~differences.isnan()]
    return float(known.max()) if len(known) else math.nan
