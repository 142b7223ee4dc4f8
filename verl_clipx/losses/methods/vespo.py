"""VESPO (arXiv 2602.10693): a smooth weight of the sequence's ratio, like a gamma density, with constants by sign."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, full_like, where

from verl_clipx.losses.base.method import NODE, Bounds, ConstantWeight
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Tokens

# The range of the sequence's log-ratio in TRL and in the authors' code.
LOWEST = math.log(1e-8)
HIGHEST = 20.0

# The largest weight that k and lambda may lead to at any w. float32 ends at 3e38; the rest is left for A and log_prob.
LARGEST_WEIGHT = 1e30


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

    Values of k and lambda that would let F grow above 1e30 are refused, because float32 ends at 3e38.
    """

    bounds_on = "sequence's ratio"

    by_sequence = True

    k_positive: float = weight_parameter(2.0, 20, "power of w where A >= 0; larger: less weight of small ratios")
    lambda_positive: float = weight_parameter(3.0, 30, "decay with w where A >= 0; larger: less weight of large ratios")
    k_negative: float = weight_parameter(3.0, 20, "power of w where A < 0; larger: less weight of small ratios")
    lambda_negative: float = weight_parameter(2.0, 30, "decay with w where A < 0; larger: less weight of large ratios")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_computable(self, "k_positive", "lambda_positive")
        require_computable(self, "k_negative", "lambda_negative")

    def bounded(self, t: Tokens) -> Tensor:
        """Return the sequence's ratio w at each of its tokens, (sequences, length)."""
        return self._log_ratio(t).exp().expand_as(t.ratio)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        log_w = self._log_ratio(t)
        is_negative = t.advantages < 0
        # One of the two branches is a tensor, so that the result has the ratio's dtype: `where` of two Python numbers
        # has PyTorch's default dtype.
        k = where(is_negative, full_like(t.ratio, self.k_negative), self.k_positive)
        lambda_ = where(is_negative, full_like(t.ratio, self.lambda_negative), self.lambda_positive)
        return (k * log_w + lambda_ * (1 - log_w.exp())).exp()

    def _log_ratio(self, t: Tokens) -> Tensor:
        """Return log w, (sequences, 1)."""
        return where(t.mask, t.log_ratio, 0.0).sum(-1, keepdim=True).clamp(LOWEST, HIGHEST)


def require_computable(method: Vespo, k_name: str, lambda_name: str) -> None:
    """Raise a Refusal if the weight of one sign would grow above `LARGEST_WEIGHT`.

    Args:
        method: the method.
        k_name: the name of the parameter that is k for this sign.
        lambda_name: the name of the parameter that is lambda.
    """
    k = getattr(method, k_name)
    lambda_ = getattr(method, lambda_name)
    # F is largest at w = k / lambda, or at the end of the range that is nearest to it.
    log_w = min(max(math.log(k / lambda_), LOWEST), HIGHEST)
    largest_log_weight = k * log_w + lambda_ * (1 - math.exp(log_w))
    if largest_log_weight > math.log(LARGEST_WEIGHT):
        reason = f"with {NODE}.{lambda_name}={lambda_:g} it lets the weight F grow above {LARGEST_WEIGHT:g}"
        raise Refusal(f"{NODE}.{k_name}", k, reason, f"Lower {NODE}.{k_name}, or raise {NODE}.{lambda_name}.")
