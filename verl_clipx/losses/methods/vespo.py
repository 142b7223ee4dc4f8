"""VESPO (arXiv 2602.10693): a smooth weight of the sequence's ratio, like a gamma density, with constants by sign."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, full_like, where

from verl_clipx.losses.base.method import Bounds, ConstantWeight
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens

# The range of the sequence's log-ratio in TRL and in the authors' code.
LOWEST = math.log(1e-8)
HIGHEST = 20.0


def weight_parameter(default: float, at_most: float, meaning: str) -> Any:
    """Return a parameter that is a constant of the weight. The arguments are as for `parameter` and `number`."""
    return parameter(default, number(above=0, at_most=at_most), meaning, "release", role="soft weight")


@dataclass(frozen=True, kw_only=True)
class Vespo(
    ConstantWeight,
    name="vespo",
    source="VESPO (arXiv 2602.10693), as in TRL 1.16",
):
    """A soft weight of the sequence's ratio instead of bounds.

    w is the product of the ratios of a sequence's tokens, with log w within [log 1e-8, 20]. F = w^k exp(lambda (1 - w))
    is 1 at w = 1 and largest at w = k / lambda. k and lambda are k_positive and lambda_positive where A >= 0, and
    k_negative and lambda_negative elsewhere. log_ratio_clamp acts on each token before the product.
    """

    bounds_on = "sequence's ratio"

    by_sequence = True

    k_positive: float = weight_parameter(2.0, 20, "power of w where A >= 0; larger: less weight of small ratios")
    lambda_positive: float = weight_parameter(3.0, 30, "decay with w where A >= 0; larger: less weight of large ratios")
    k_negative: float = weight_parameter(3.0, 20, "power of w where A < 0; larger: less weight of small ratios")
    lambda_negative: float = weight_parameter(2.0, 30, "decay with w where A < 0; larger: less weight of large ratios")

    def bounded(self, t: Tokens) -> Tensor:
        """Return the sequence's ratio w at each of its tokens, (sequences, length)."""
        return self._log_ratio(t).exp().expand_as(t.ratio)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        log_w = self._log_ratio(t)
        is_negative = t.advantages < 0
        # Tensors and not numbers, because `where` of two numbers would be float32 for float64 tokens too.
        k = where(is_negative, full_like(t.ratio, self.k_negative), self.k_positive)
        decay = where(is_negative, full_like(t.ratio, self.lambda_negative), self.lambda_positive)
        return (k * log_w + decay * (1 - log_w.exp())).exp()

    def _log_ratio(self, t: Tokens) -> Tensor:
        """Return log w, (sequences, 1)."""
        return where(t.mask, t.log_ratio, 0.0).sum(-1, keepdim=True).clamp(LOWEST, HIGHEST)
