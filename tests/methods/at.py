"""Tokens at ratios that a test chooses."""

import math

import torch
from torch import Tensor

from verl_clipx.base.tokens import Tokens
from verl_clipx.methods import Bounds, Method


def row(*values: float | bool, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """One sequence."""
    return torch.tensor([values], dtype=dtype)


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
    return Tokens(old + free, old, advantages, mask, log_ratio, clamped, ratio, log_ratio == free, **optional)


def weight_and_value(
    method: Method, ratio: Tensor, advantages: Tensor, bounds: Bounds | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient weight F and the loss's value at these ratios; bounds: None for the method's own fixed ones."""
    t = tokens_at(ratio, advantages, clamp=method.log_ratio_clamp)
    if bounds is None:
        bounds = method.bounds(t, method.decide(method.statistics(t)))
    weight = method.gradient_weight(t, bounds)
    return weight, method.loss_value(t, bounds, weight)


def weight(method: Method, ratio: Tensor, advantages: Tensor, bounds: Bounds | None = None) -> Tensor:
    """The gradient weight F alone."""
    return weight_and_value(method, ratio, advantages, bounds)[0]
