"""CE-GPPO (arXiv 2509.20712): GPPO with the two preserved gradients scaled, to steer entropy."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, FixedBounds, dual_clip_parameter
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class CeGppo(FixedBounds, name="ce_gppo", source="CE-GPPO (arXiv 2509.20712), in the form of DGPO's Eq. 5"):
    """GPPO with a scale on each side.

    F = beta_low low where A < 0 and r < low, beta_high high where A > 0 and r > high, and r elsewhere, but 0 in place
    of r where the log-ratio clamp acts. With a dual clip, which only the authors' released code has, F = 0 where A < 0
    and r > dual_clip.
    """

    bounds_width = Width()

    beta_low: float = parameter(
        0.75, number(at_least=0, at_most=10), "scale of the weight of tokens below the lower bound, A < 0", "paper"
    )
    beta_high: float = parameter(
        1.0, number(at_least=0, at_most=10), "scale of the weight of tokens above the upper bound, A > 0", "paper"
    )
    dual_clip: float | None = dual_clip_parameter(None, "paper")

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        r = t.free_ratio
        weight = where(t.unclamped, r, 0.0)
        weight = where((A < 0) & (r < bounds.low), self.beta_low * bounds.low, weight)
        weight = where((A > 0) & (r > bounds.high), self.beta_high * bounds.high, weight)
        if self.dual_clip is not None:
            weight = where((A < 0) & (r > self.dual_clip), 0.0, weight)
        return weight
