"""Measures the difference of a gradient from the announced one, for the receipt and `check_gradient`."""

import math

import torch
from torch import Tensor

from verl_clipx.losses.base.tolerances import TOLERANCES

# From the dtype of log_prob to how far two gradients of a token may differ, relative to their size.
RESOLVED = {getattr(torch, name): tolerance for name, tolerance in TOLERANCES.items()}
# The size of a token's gradient counts as at least this share of what it is at F = 1. The gradient of a clipped token
# is 0, and nothing could be relative to that.
LEAST = 0.01
# How far rounding may move log_prob, in nats. A token that is closer than this to a bound may have the gradient of
# either side.
ROUNDING = 1e-6


def apart(gradient: Tensor, announced: Tensor, at_ratio_1: Tensor, besides: Tensor) -> Tensor:
    """Return how far each token's gradient is from the announced one, relative to the size of the announced one.

    Args:
        gradient: the actual gradient with respect to log_prob, of any shape.
        announced: the announced gradients with log_prob as it is, and moved by `ROUNDING` up and down: three tensors of
            that shape, stacked. A gradient between any two of them is as announced.
        at_ratio_1: what would be announced at F = 1, of that shape.
        besides: the gradient of the loss's other terms, such as that of the entropy, of that shape.

    Returns:
        Of that shape, 0 or more. It is NaN where an announced gradient is not finite, because nothing is known there,
        and infinite where only the actual gradient is not finite.
    """
    limits = torch.finfo(gradient.dtype)
    is_known = announced.isfinite().all(0) & besides.isfinite()
    sizes = torch.stack([announced[0], besides, LEAST * at_ratio_1.nan_to_num(nan=0.0)]).abs()
    size = sizes.amax(0).clamp(limits.smallest_normal, limits.max)
    # The gradient may be of a narrower dtype, in which what overflows becomes its largest number.
    expected = (announced + besides).clamp(-limits.max, limits.max)
    too_low_by = expected.amin(0) - gradient
    too_high_by = gradient - expected.amax(0)
    difference = torch.maximum(too_low_by, too_high_by).clamp(min=0) / size
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).where(is_known, torch.nan)


def largest_known(differences: Tensor) -> float:
    """Return the largest of the differences that `apart` returns; NaN if none is known."""
    known = differences[~differences.isnan()]
    return float(known.max()) if len(known) else math.nan
