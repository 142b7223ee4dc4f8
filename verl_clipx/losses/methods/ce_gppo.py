"""CE-GPPO (arXiv 2509.20712): GPPO with a scale on the gradients that it keeps outside the bounds, to steer entropy."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, FixedBounds, dual_clip_parameter
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class CeGppo(FixedBounds, name="ce_gppo", source="CE-GPPO (arXiv 2509.20712), in the form of DGPO's Eq. 5"):
    """GPPO with a scale on each side.

        F = beta_low * low    where A < 0 and r < low
        F = beta_high * high  where A > 0 and r > high
        F = r                 elsewhere, but 0 where the log-ratio clamp acts

    With a dual clip, which only the authors' released code has, F = 0 where A < 0 and r > dual_clip.
    """

    bounds_width = Width()

    beta_low: float = parameter(
        0.75, number(at_least=0, at_most=10), "factor of the weight of tokens with A < 0 below the lower bound", "paper"
    )
    beta_high: float = parameter(
        1.0, number(at_least=0, at_most=10), "factor of the weight of tokens with A > 0 above the upper bound", "paper"
    )
    dual_clip: float | None = dual_clip_parameter(None, "paper")

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        # Without the log-ratio clamp, so that a ratio beyond it is still seen to be outside the bounds.
        r = t.free_ratio
        is_below = (A < 0) & (r < bounds.low)
        is_above = (A > 0) & (r > bounds.high)
        # The clamped ratio does not change with log_prob, so it passes no gradient.
        weight_inside = where(t.unclamped, r, 0.0)
        weight = where(is_below, self.beta_low * bounds.low, weight_inside)
        weight = where(is_above, self.beta_high * bounds.high, weight)
        if self.dual_clip is not None:
            is_dual_clipped = (A < 0) & (r > self.dual_clip)
            weight = where(is_dual_clipped, 0.0, weight)
        return weight
