"""CPPO (arXiv 2606.10968): DPPO's mask, with a smaller limit early in a response and after a prefix that has moved."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, where

from verl_clipx.losses.base.method import DUAL_CLIP, Bounds, ConstantWeight, limit_parameter
from verl_clipx.losses.base.parameters import integer, number, optional, parameter
from verl_clipx.losses.base.tokens import Tokens

# How often `quantile` halves [0, 1]. The interval is then 2^-26 wide, less than float32 resolves near 1.
HALVINGS = 26

# The budget is this quantile of a response's divergences.
QUANTILE = 0.9


@dataclass(frozen=True, kw_only=True)
class Cppo(ConstantWeight, name="cppo", source="CPPO (arXiv 2606.10968v2), Eq. 8-10, its budget by Eq. 22"):
    """Drops tokens by their divergence, weighted by position, within a budget for the prefix's mean.

    With p the current and q the old probability, D = |p - q|. Token t of T has the weight

        w = 1 - (1 - weight_last) (t - 1) / (T - 1)

    and the only token of a response the weight 1. The limit on a token's w D is

        c = min(threshold, threshold + b W - S)

    where W and S are the sums of w and of w D over the tokens before it. The budget b is the 90th percentile of D in
    the response, but at least `budget` and at most `budget_factor` times that.

    F = 0 where the token moves away, A (r - 1) > 0, and w D > c. Elsewhere F = min(r, weight_high).

    Both releases measure from the policy that sampled.
    """

    by_sequence = True
    bounds_on = "change of the token's probability"
    formula = ("-c / w", "c / w")
    symbols = (
        "c at most {threshold}, less what the tokens before have used, w from 1 at the first token to "
        "{weight_last} at the last"
    )

    threshold: float = parameter(
        0.15,
        number(at_least=0, at_most=1),
        "the largest weighted divergence of a token; the paper's MoE has 0.2",
        "paper",
        role="high",
    )
    weight_last: float = parameter(0.8, number(above=0, at_most=1), "the last token's weight; the first has 1", "paper")
    budget: float = parameter(0.02, number(at_least=0, at_most=1), "the smallest budget of a prefix's mean", "paper")
    budget_factor: float = parameter(
        2.0, number(at_least=1, at_most=100), "the largest budget, as a multiple of the smallest", "paper"
    )
    length: int | None = parameter(
        None,
        optional(integer(at_least=1, at_most=10_000_000)),
        "T in the weights, in tokens; null: each response's own length",
        "paper",
    )
    weight_high: float | None = limit_parameter(
        None, "upper bound of the ratio as a weight; null: no bound", "paper", DUAL_CLIP
    )

    def bounded(self, t: Tokens) -> Tensor:
        """Return the change p - q of the token's probability, (sequences, length)."""
        p, q = t.probabilities
        return p - q

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return the bounds -c / w and c / w on p - q of each token, (sequences, length)."""
        # Counted from 1, over the tokens in the mask.
        position = t.mask.cumsum(-1)
        token_count = t.mask.sum(-1, keepdim=True)
        length = token_count if self.length is None else torch.full_like(token_count, self.length)
        # From 0 at the first token to 1 at the last.
        progress = ((position - 1).to(t.ratio.dtype) / (length - 1).clamp(min=1)).clamp(0.0, 1.0)
        weight = 1 - (1 - self.weight_last) * progress
        divergence = where(t.mask, self.bounded(t).abs(), 0.0)
        smallest_budget = self.budget
        largest_budget = self.budget * self.budget_factor
        budget = quantile(divergence, t.mask, QUANTILE).clamp(smallest_budget, largest_budget)
        unused_budget = where(t.mask, budget * weight - weight * divergence, 0.0)
        # What is clamped is b W - S, which is over the tokens before this one. It has no name, so that its memory is
        # free again at once.
        limit = self.threshold + (unused_budget.cumsum(-1) - unused_budget).clamp(max=0.0)
        # Where the prefix has used its whole budget, the limit is 0, and only tokens that move back keep their
        # gradient.
        high = limit.clamp(min=0.0) / weight
        return Bounds(-high, high)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        weight = t.ratio if self.weight_high is None else t.ratio.clamp(max=self.weight_high)
        is_dropped = bounds.clipped(self.bounded(t), t.advantages)
        return where(is_dropped, 0.0, weight)


def quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return a quantile of each sequence's values, interpolated between two values as by numpy.

    The interval that contains it is halved again and again. Sorting the values would be a step of its own on an
    accelerator, while the compiler fuses the halvings with the rest of the loss.

    Args:
        values: in [0, 1], (sequences, length).
        mask: the values that count, bool, (sequences, length).
        share: the share of the values that are below the quantile, in [0, 1].

    Returns:
        (sequences, 1); 0 for a sequence without tokens.
    """
    count = mask.sum(-1, keepdim=True)
    # With the values in ascending order and ranks from 0 on, the quantile lies at this rank, which may be fractional.
    rank = share * (count - 1).clamp(min=0).to(values.dtype)
    whole_rank = rank.floor()
    # Find the shortest interval [0, high] that contains more than whole_rank values, and so the value at that rank.
    low = torch.zeros_like(rank)
    high = torch.ones_like(rank)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        has_enough = (mask & (values <= middle)).sum(-1, keepdim=True) > whole_rank
        low = where(has_enough, low, middle)
        high = where(has_enough, middle, high)
    is_within = mask & (values <= high)
    value_at_rank = where(is_within, values, 0.0).amax(-1, keepdim=True)
    next_value = where(mask & ~is_within, values, math.inf).amin(-1, keepdim=True)
    # Where values are equal, or too close to each other for the halvings, the next value lies within the interval too.
    has_next_within = is_within.sum(-1, keepdim=True) > whole_rank + 1
    next_value = where(has_next_within, value_at_rank, next_value).clamp(max=1.0)
    interpolated = value_at_rank + (rank - whole_rank) * (next_value - value_at_rank)
    return where(count > 0, interpolated, 0.0)
