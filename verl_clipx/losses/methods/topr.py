"""TOPR (arXiv 2503.14286): REINFORCE on old samples, with a weight that fades out for negative ones."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, where

from verl_clipx.losses.base.method import LARGEST_CAP, Bounds, ConstantWeight, require_not_above
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.base.tokens import Tokens, saturate


def weight_parameter(default: float, at_least: float, at_most: float, meaning: str) -> Any:
    """Return a parameter that is a limit of the weight. The arguments are as for `parameter` and `number`."""
    return parameter(default, number(at_least=at_least, at_most=at_most), meaning, "paper", role="truncation")


@dataclass(frozen=True, kw_only=True)
class Topr(ConstantWeight, name="topr", source="TOPR (arXiv 2503.14286), Eq. 7-8"):
    """Weight 1 for positive samples and the truncated importance ratio for negative ones; no gradient is dropped.

    F = clip(ratio, positive_low, positive_high) where A >= 0 and clip(ratio, negative_low, negative_high) where A < 0.
    The paper's canonical limits are [1, 1] and [0, 1]. The ratio is that of the whole sequence (the paper's trajectory)
    to the old policy, which is the product over its tokens. log_ratio_clamp acts on each token before the product.

    In the paper, A is the reward, 1 or -1, without a baseline.
    """

    by_sequence = True

    level: str = parameter(
        "sequence",
        choice("sequence", "token"),
        "the importance ratio of the whole sequence (paper), or of each token separately",
        "paper",
    )
    positive_low: float = weight_parameter(1.0, 0, 1, "smallest weight where A >= 0 (the paper's a+)")
    positive_high: float = weight_parameter(1.0, 1, LARGEST_CAP, "largest weight where A >= 0 (the paper's b+)")
    negative_low: float = weight_parameter(0.0, 0, 1, "smallest weight where A < 0 (the paper's a-)")
    negative_high: float = weight_parameter(1.0, 0, LARGEST_CAP, "largest weight where A < 0 (the paper's b-)")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_above(self, "negative_low", "negative_high")

    @property
    def limits(self) -> dict[str, str]:
        constant = self.positive_low == self.positive_high and self.negative_low == self.negative_high
        return {} if constant else super().limits

    def bounded(self, t: Tokens) -> Tensor:
        """Return the ratio of each token, or of its sequence, (sequences, length)."""
        if self.level == "token":
            return t.ratio
        total = where(t.mask, t.log_ratio, 0.0).sum(-1, keepdim=True)
        return saturate(total).exp().expand_as(t.ratio)

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return the limits of each token's weight, unless they leave it only one value, whatever the ratio is."""
        is_negative = t.advantages < 0
        positive = bounds_of_limits(self.positive_low, self.positive_high)
        negative = bounds_of_limits(self.negative_low, self.negative_high)
        # One of the two branches is a tensor, so that the result has the ratio's dtype: `where` of two Python numbers
        # has PyTorch's default dtype.
        negative_low = t.ratio.new_full((), negative.low)
        negative_high = t.ratio.new_full((), negative.high)
        return Bounds(
            low=where(is_negative, negative_low, positive.low),
            high=where(is_negative, negative_high, positive.high),
        )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        ratio = self.bounded(t)
        positive_weight = ratio.clamp(self.positive_low, self.positive_high)
        negative_weight = ratio.clamp(self.negative_low, self.negative_high)
        return where(A < 0, negative_weight, positive_weight)


def bounds_of_limits(low: float, high: float) -> Bounds:
    """Return the bounds on the ratio that two limits of the weight are.

    If both are equal, the weight does not follow the ratio, and there is no bound on it.
    """
    if low == high:
        return Bounds(0.0, math.inf)
    return Bounds(low, high)
