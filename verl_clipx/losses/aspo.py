"""ASPO: the ratio flipped to its inverse, so that tokens the policy has already learned weigh less."""

from typing import Literal

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import followed_ratio


def gradient_weight(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    flip: Literal["positive", "both"] = "positive",
    weight_low: float | None = None,
    weight_high: float | None = 3.0,
    negative_weight_high: float | None = 3.0,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """0 in regions LN and HP; elsewhere 1/ratio on flipped tokens and the ratio on the others, softly capped.

    A capped token keeps a gradient, with the cap as its weight.

    Args:
        ratio: (sequences, length), saturated but not clamped.
        advantages: (sequences, length).
        bounds: bounds on the ratio, for the hard mask of LN and HP.
        flip: which tokens weigh 1/ratio: those with A > 0, or all ("both", Eq. 6 of the DGPO paper as printed).
        weight_low, weight_high: bounds on 1/ratio of flipped tokens; None for none.
        negative_weight_high: upper bound on the ratio of tokens that are not flipped; None for none.
        log_ratio_clamp: where the weight is the ratio, no gradient beyond a log-ratio of +-this; None for no limit.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Raises:
        ValueError: `flip` is neither "positive" nor "both".

    Source: ASPO; as a gradient weight, DGPO, Eq. 6. The defaults are those of the authors' released code.
    """
    flipped = ratio.reciprocal()
    if weight_low is not None:
        flipped = flipped.clamp(min=weight_low)
    if weight_high is not None:
        flipped = flipped.clamp(max=weight_high)

    if flip == "both":
        weight = flipped
    elif flip == "positive":
        unflipped = followed_ratio(ratio, log_ratio_clamp)
        if negative_weight_high is not None:
            # By the ratio and not by the followed one: a capped weight is the cap, also beyond the clamp.
            unflipped = torch.where(ratio > negative_weight_high, negative_weight_high, unflipped)
        weight = torch.where(advantages > 0, flipped, unflipped)
    else:
        raise ValueError(f"flip={flip!r}: use 'positive' (flip tokens with A > 0) or 'both' (flip every token)")

    masked = ((advantages < 0) & (ratio < bounds.low)) | ((advantages > 0) & (ratio > bounds.high))
    return torch.where(masked, 0.0, weight)
