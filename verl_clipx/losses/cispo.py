"""CISPO: every token keeps a gradient, with the clipped ratio as its weight."""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds


def gradient_weight(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    mask_low: float | None = None,
    mask_high: float | None = None,
) -> Tensor:
    """The ratio clamped to the bounds, optionally 0 where PPO with its own bounds would clip.

    Args:
        ratio: (sequences, length), already clamped to +-log_ratio_clamp if there is one. The weight is a constant to
            the gradient, so no token loses its gradient to that clamp.
        advantages: (sequences, length).
        bounds: bounds on the weight.
        mask_low: tokens with A < 0 and ratio < mask_low get weight 0; None masks none.
        mask_high: tokens with A > 0 and ratio > mask_high get weight 0; None masks none.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Source: MiniMax-M1 (which has no lower bound: low = 0), its unified form with a mask; as a gradient weight, DGPO,
    Eq. 3.
    """
    weight = bounds.clip(ratio)
    if mask_low is not None:
        weight = torch.where((advantages < 0) & (ratio < mask_low), 0.0, weight)
    if mask_high is not None:
        weight = torch.where((advantages > 0) & (ratio > mask_high), 0.0, weight)
    return weight


def loss_value(weight: Tensor, advantages: Tensor, log_prob: Tensor) -> Tensor:
    """-F * A * log_prob, whose derivative with F held constant is -F * A, as in verl.

    Args:
        weight: F, (sequences, length).
        advantages: (sequences, length).
        log_prob: log-probabilities under the current policy, (sequences, length).

    Returns:
        (sequences, length), in the weight's dtype.
    """
    return -weight * advantages * log_prob.detach().to(weight.dtype)
