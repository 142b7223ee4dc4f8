"""Tokens at ratios that a test chooses."""

import math

import torch
from torch import Tensor

from verl_clipx.tokens import Tokens


def tokens_at(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clamp: float | None = 20.0,
    mask: Tensor | None = None,
    old_log_prob: Tensor | None = None,
    **optional: Tensor,
) -> Tokens:
    """Tokens with exactly these ratios, unlike those from log-probabilities, which round.

    Args:
        ratio, advantages: (sequences, length), of one dtype.
        clamp: log_ratio_clamp.
        mask: bool, (sequences, length); None: all.
        old_log_prob: (sequences, length); None: zeros, probability 1.
        **optional: rollout_log_prob, entropy, group.
    """
    free = ratio.log()
    old = torch.zeros_like(ratio) if old_log_prob is None else old_log_prob
    if clamp is None:
        log_ratio, clamped = free, ratio
    else:
        log_ratio, clamped = free.clamp(-clamp, clamp), ratio.clamp(math.exp(-clamp), math.exp(clamp))
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask
    return Tokens(
        old + free, old, advantages, mask, log_ratio, clamped, ratio, log_ratio == free, **optional
    )
