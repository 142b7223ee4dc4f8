"""GPPO: the tokens that PPO clips keep a gradient, with the bound as its weight."""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import followed_ratio


def gradient_weight(
    ratio: Tensor, advantages: Tensor, bounds: Bounds, *, log_ratio_clamp: float | None = None
) -> Tensor:
    """The lower bound in region LN, the upper bound in HP, else the ratio.

    Args:
        ratio: (sequences, length), saturated but not clamped.
        advantages: (sequences, length).
        bounds: bounds on the ratio.
        log_ratio_clamp: where the weight is the ratio, no gradient beyond a log-ratio of +-this; None for no limit.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Source: gradient-preserving clipping of Klear-Reasoner; as a gradient weight, DGPO, Eq. 4.
    """
    weight = followed_ratio(ratio, log_ratio_clamp)
    weight = torch.where((advantages < 0) & (ratio < bounds.low), bounds.low, weight)
    return torch.where((advantages > 0) & (ratio > bounds.high), bounds.high, weight)
