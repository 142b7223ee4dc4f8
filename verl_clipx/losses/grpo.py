"""GRPO's clipped surrogate with bounds of any shape: also DAPO's clip-higher, ACPO and BAPO."""

import math

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import beyond_clamp, saturation_limit
from verl_clipx.masking import kept, less, spread


def gradient_weight(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """0 where the surrogate is clipped, else the ratio.

    Clipped are A > 0 with ratio > high, A < 0 with ratio < low, and A < 0 with ratio > dual_clip; equality is not.

    Args:
        ratio: (sequences, length), saturated but not clamped.
        advantages: (sequences, length).
        bounds: bounds on the ratio.
        dual_clip: upper bound on the ratio of tokens with a negative advantage, above 1; None for none.
        log_ratio_clamp: no gradient where the log-ratio is beyond +-this; None for no such limit.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Source: PPO's clipped objective (Schulman et al. 2017, Eq. 7); as a gradient weight, DGPO,
    Eq. 2. Dual clip from Ye et al. 2020.
    """
    low, high = less(ratio, bounds.low), less(bounds.high, ratio)
    if dual_clip is not None:
        low |= less(dual_clip, ratio)
    clipped = low.bitwise_and_(less(advantages, 0.0)) | high.bitwise_and_(less(0.0, advantages))
    beyond = beyond_clamp(ratio, log_ratio_clamp)
    if beyond is not None:
        clipped |= beyond
    return kept(ratio, spread(clipped.bitwise_not_()))


def loss_value(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """The clipped surrogate to minimise: max(-A ratio, -A clip(ratio)), and for A < 0 at most -A dual_clip.

    Arguments as for `gradient_weight`; the ratio is clamped here.

    Returns:
        (sequences, length), in the ratio's dtype; away from the clips its derivative with respect to log_prob is
        -F * A.
    """
    if log_ratio_clamp is not None:
        limit = min(log_ratio_clamp, saturation_limit(ratio.dtype))
        ratio = ratio.clamp(math.exp(-limit), math.exp(limit))
    value = torch.minimum(advantages * ratio, bounds.clip(ratio).mul_(advantages)).neg_()
    if dual_clip is None:
        return value
    # Where A is positive the value is below 0, and so below this limit, anyway.
    return torch.minimum(value, advantages.abs().mul_(dual_clip))
