"""GPPO (Klear-Reasoner, arXiv 2508.07629): tokens that PPO clips keep a gradient, with the bound as their weight."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, FixedBounds
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class Gppo(FixedBounds, name="gppo", source="GPPO (arXiv 2508.07629), in the form of DGPO's Eq. 4"):
    """Tokens outside the bounds keep the bound as their weight.

    F = low   where A < 0 and r < low
    F = high  where A > 0 and r > high
    F = r     elsewhere, but 0 where the log-ratio clamp acts
    """

    bounds_width = Width()

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        # Without the log-ratio clamp, so that a ratio beyond it is still seen to be outside the bounds.
        r = t.free_ratio
        is_below = (A < 0) & (r < bounds.low)
        is_above = (A > 0) & (r > bounds.high)
        # The clamped ratio does not change with log_prob, so it passes no gradient.
        weight_inside = where(t.unclamped, r, 0.0)
        weight = where(is_below, bounds.low, weight_inside)
        return where(is_above, bounds.high, weight)
