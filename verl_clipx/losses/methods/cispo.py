"""CISPO (MiniMax-M1, arXiv 2506.13585): every token keeps a gradient, with the clipped ratio as its weight."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import LARGEST_BOUND, Bounds, ConstantWeight, FixedBounds, limit_parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class Cispo(ConstantWeight, FixedBounds, name="cispo", source="MiniMax-M1 (arXiv 2506.13585), Eq. 4-5"):
    """Clips the importance weight and keeps every token's gradient.

    F = clip(r, low, high). mask_low and mask_high, both off by default, give the unified form (Eq. 7), in which F = 0
    where A < 0 and r < mask_low, and where A > 0 and r > mask_high. They change F alone, and not the response mask.
    """

    bounds_width = Width(every_sign=True)

    mask_low: float | None = limit_parameter(
        None, "drop tokens with A < 0 and a ratio below this; null: drop none", "paper", at_least=0, at_most=1
    )
    mask_high: float | None = limit_parameter(
        None, "drop tokens with A > 0 and a ratio above this; null: drop none", "paper", at_most=LARGEST_BOUND
    )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        r = t.ratio
        weight = bounds.clip(r)
        if self.mask_low is not None:
            weight = where((A < 0) & (r < self.mask_low), 0.0, weight)
        if self.mask_high is not None:
            weight = where((A > 0) & (r > self.mask_high), 0.0, weight)
        return weight
