"""ASPO (arXiv 2510.06062): a flipped ratio, so that positive tokens that the policy has already learned weigh less."""

import math
from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.base.method import LARGEST_CAP, Bounds, FixedBounds
from verl_clipx.base.parameters import choice, number, optional, parameter
from verl_clipx.base.tokens import Tokens


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
    weight_low: float | None = parameter(
        None,
        optional(number(at_least=0, at_most=1)),
        "lower bound of a reciprocal weight; null: no bound",
        "script",
        role="beside",
    )
    weight_high: float | None = parameter(
        3.0,
        optional(number(at_least=1, at_most=LARGEST_CAP)),
        "upper bound of a reciprocal weight; null: no bound",
        "script",
        role="beside",
    )
    negative_weight_high: float | None = parameter(
        3.0,
        optional(number(at_least=1, at_most=LARGEST_CAP)),
        "upper bound of the weight of tokens that are not flipped; null: no bound",
        "script",
        role="beside",
    )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A, r = t.advantages, t.free_ratio
        weight = (1 / r).clamp(self.weight_low or 0.0, math.inf if self.weight_high is None else self.weight_high)
        if self.flip == "positive":
            unflipped = where(t.live, r, 0.0)
            if self.negative_weight_high is not None:
                # By the ratio, live or not: a capped weight is the cap, also beyond the clamp.
                unflipped = where(r > self.negative_weight_high, self.negative_weight_high, unflipped)
            weight = where(A > 0, weight, unflipped)
        return where(bounds.clipped(r, A), 0.0, weight)
