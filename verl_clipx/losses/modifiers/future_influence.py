"""FIPO: a token's advantage is weighted by how the policy has moved on the tokens after it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, where

from verl_clipx.losses.base.parameters import Parameters, number, optional, parameter
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Tokens

# The weights of tokens with A < 0 and a ratio above `safe_ratio` stay between these, in the authors' release.
SAFE_LOW = 0.8
SAFE_HIGH = 1.0

# A later token whose weight has been halved this many times adds nothing in float64.
MOST_HALVINGS = 64

AT_LEAST_ONE = optional(number(at_least=1, at_most=1e6))


@dataclass(frozen=True, kw_only=True)
class FutureInfluence(Parameters):
    """Multiplies each advantage by f = exp(sum over k >= t of gamma^(k - t) log r_k), clamped.

    Source: FIPO (arXiv 2603.19835), as ms-swift computes it (loss_type=fipo); gamma = 2^(-1 / half_life).
    """

    node_key: ClassVar[str] = "clipx.shaping"
    rule: ClassVar[str] = "fipo"
    by_sequence: ClassVar[bool] = True

    half_life: float = parameter(
        32.0, number(at_least=1, at_most=1e6), "after so many tokens a later token counts half", "script"
    )
    low: float | None = parameter(
        1.0, optional(number(at_least=0, at_most=1)), "the smallest weight; null: no bound", "script"
    )
    high: float | None = parameter(1.2, AT_LEAST_ONE, "the largest weight; null: no bound", "script")
    safe_ratio: float | None = parameter(
        4.0,
        AT_LEAST_ONE,
        "tokens with A < 0 and a ratio above this get a weight between 0.8 and 1; null: no such rule",
        "script",
    )
    counted_ratio: float | None = parameter(
        None,
        AT_LEAST_ONE,
        "tokens with a ratio above this do not count in the weights of earlier ones; null: all count. The authors' 32B "
        "run has 10, its dual clip",
        "choice",
    )

    def advantages(self, t: Tokens) -> Tensor:
        """Return the weighted advantages f * A, (sequences, length). No gradient flows through f."""
        log_ratio = where(t.mask, t.log_ratio, 0.0)
        if self.counted_ratio is not None:
            log_ratio = where(t.ratio > self.counted_ratio, 0.0, log_ratio)
        # Clamped, so that the weight cannot overflow where there is no upper bound.
        weight = sum_discounted(log_ratio, self.half_life).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        low = 0.0 if self.low is None else self.low
        weight = weight.clamp(low, self.high)
        if self.safe_ratio is not None:
            is_unsafe = (t.advantages < 0) & (t.ratio > self.safe_ratio)
            weight = where(is_unsafe, weight.clamp(SAFE_LOW, SAFE_HIGH), weight)
        return weight * t.advantages


def sum_discounted(values: Tensor, half_life: float) -> Tensor:
    """Sum, at each token t, gamma^(k - t) * values_k over the tokens k >= t, with gamma = 2^(-1 / half_life).

    Each round doubles the number of tokens that a sum covers: to a sum over `reach` tokens it adds the sum over the
    next `reach` ones. There are as many rounds as it takes until gamma^(k - t) is below float64's precision. Their
    number does not depend on the length, because a compiled graph serves every length.

    Args:
        values: (sequences, length).
        half_life: the number of tokens after which a later token counts half.

    Returns:
        (sequences, length).
    """
    length = values.shape[-1]
    position = torch.arange(length, device=values.device)
    total = values
    for doubling in range(math.ceil(math.log2(MOST_HALVINGS * half_life)) + 1):
        reach = 2**doubling
        next_position = position + reach
        next_sum = total.gather(-1, next_position.clamp(max=length - 1).expand_as(total))
        discount = 2 ** (-reach / half_life)
        total = total + where(next_position < length, discount * next_sum, 0.0)
    return total
