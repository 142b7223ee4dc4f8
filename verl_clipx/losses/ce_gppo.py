"""CE-GPPO: GPPO with the two preserved gradients scaled, to steer entropy."""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import followed_ratio


def gradient_weight(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    beta_low: float,
    beta_high: float,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """beta_low times the lower bound in region LN, beta_high times the upper bound in HP, else the ratio.

    Args:
        ratio: (sequences, length), saturated but not clamped.
        advantages: (sequences, length).
        bounds: bounds on the ratio.
        beta_low: scale in region LN, at least 0 (beta_1 in the paper: 0.75).
        beta_high: scale in region HP, at least 0 (beta_2 in the paper: 1.0).
        dual_clip: tokens with A < 0 and ratio > dual_clip get weight 0; None for none.
        log_ratio_clamp: where the weight is the ratio, no gradient beyond a log-ratio of +-this; None for no limit.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Source: CE-GPPO; as a gradient weight, DGPO, Eq. 5. The dual clip is the authors' released code's.
    """
    weight = followed_ratio(ratio, log_ratio_clamp)
    weight = torch.where((advantages < 0) & (ratio < bounds.low), beta_low * bounds.low, weight)
    weight = torch.where((advantages > 0) & (ratio > bounds.high), beta_high * bounds.high, weight)
    if dual_clip is not None:
        weight = torch.where((advantages < 0) & (ratio > dual_clip), 0.0, weight)
    return weight
