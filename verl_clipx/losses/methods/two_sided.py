"""Double-sided importance sampling (GLM-5, SkyRL's rollout_is): a token outside the bounds gets no gradient."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, ConstantWeight, FixedBounds
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class TwoSided(
    ConstantWeight,
    FixedBounds,
    name="two_sided",
    source="GLM-5's report (double-sided importance sampling); the loss rollout_is of SkyRL 0.3",
):
    """Drops every token whose ratio is outside the bounds, whichever sign its advantage has.

    F = r where low <= r <= high, and F = 0 elsewhere. PPO's clip keeps the tokens outside that move back.

    Both sources measure the ratio from the policy that sampled.
    """

    bounds_width = Width(every_sign=True, mask=True)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        r = t.free_ratio
        return where((r < bounds.low) | (r > bounds.high), 0.0, t.ratio)
