"""ASPO (arXiv 2510.06062): a flipped ratio, so that positive tokens that the policy has already learned weigh less."""

import math
from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, FixedBounds, limit_parameter
from verl_clipx.losses.base.parameters import choice, parameter
from verl_clipx.losses.base.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Aspo(FixedBounds, name="aspo", source="ASPO (arXiv 2510.06062), in the form of its authors' code"):
    """The reciprocal ratio as the weight of positive tokens, with a soft cap.

    F = 0 where PPO clips. Otherwise F = 1/r for flipped tokens and F = r for the others. The cap is soft: a capped
    token keeps a gradient, with the cap as its weight. The defaults are those of the authors' released code.
    """

    flip: str = parameter(
        "positive",
        choice("positive", "both"),
        "tokens whose weight is the reciprocal ratio: those with A > 0, or all",
        "script",
    )
    weight_low: float | None = limit_parameter(
        None, "lower bound of a reciprocal weight; null: no bound", "script", at_least=0, at_most=1
    )
    weight_high: float | None = limit_parameter(3.0, "upper bound of a reciprocal weight; null: no bound", "script")
    negative_weight_high: float | None = limit_parameter(
        3.0, "upper bound of the weight of tokens that are not flipped; null: no bound", "script"
    )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        r = t.free_ratio
        low = 0.0 if self.weight_low is None else self.weight_low
        high = math.inf if self.weight_high is None else self.weight_high
        weight = (1 / r).clamp(low, high)
        if self.flip == "positive":
            unflipped = where(t.unclamped, r, 0.0)
            if self.negative_weight_high is not None:
                # By the ratio without the clamp, because a capped weight is the cap beyond the clamp too.
                unflipped = where(r > self.negative_weight_high, self.negative_weight_high, unflipped)
            weight = where(A > 0, weight, unflipped)
        return where(bounds.clipped(r, A), 0.0, weight)
