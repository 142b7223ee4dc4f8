"""CPPO (arXiv 2606.10968): DPPO's mask, with less room early in a response and after a prefix that has moved."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, where

from verl_clipx.losses.base.method import DUAL_CLIP, Bounds, ConstantWeight, limit_parameter
from verl_clipx.losses.base.parameters import integer, number, optional, parameter
from verl_clipx.losses.base.tokens import Tokens

# So many halvings of [0, 1] tell any two divergences in float32 apart.
HALVINGS = 26
QUANTILE = 0.9


@dataclass(frozen=True, kw_only=True)
class Cppo(ConstantWeight, name="cppo", source="CPPO (arXiv 2606.10968v2), Eq. 8-10, its budget by Eq. 22"):
    """Drops tokens by their divergence, weighted by position, within a budget for the prefix's mean.

    With p the current and q the old probability, D = |p - q|. Token t of T has the weight
    w = 1 - (1 - weight_last) (t - 1) / (T - 1), a single one 1, and the room
    c = min(threshold, threshold + b W - S), W and S being the sums of w and w D over the tokens before it. The budget b
    is the 90th percentile of D in the response, but at least `budget` and at most `budget_factor` times that.
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
        2.0, number(at_least=1, at_most=100), "the largest budget is so many times the smallest", "paper"
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
        """p - q."""
        p, q = t.probabilities
        return p - q

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """The room of each token over its weight, either way."""
        place = t.mask.cumsum(-1)
        number_of_tokens = t.mask.sum(-1, keepdim=True)
        length = number_of_tokens if self.length is None else torch.full_like(number_of_tokens, self.length)
        passed = ((place - 1).to(t.ratio.dtype) / (length - 1).clamp(min=1)).clamp(0.0, 1.0)
        weight = 1 - (1 - self.weight_last) * passed
        moved = where(t.mask, self.bounded(t).abs(), 0.0)
        least = self.budget
        most = self.budget * self.budget_factor
        budget = quantile(moved, t.mask, QUANTILE).clamp(least, most)
        # Without the token itself.
        gained = where(t.mask, budget * weight - weight * moved, 0.0)
        room = self.threshold + (gained.cumsum(-1) - gained).clamp(max=0.0)
        # A token that moves back is at no room on the other side.
        high = room.clamp(min=0.0) / weight
        return Bounds(-high, high)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        weight = t.ratio if self.weight_high is None else t.ratio.clamp(max=self.weight_high)
        return where(bounds.clipped(self.bounded(t), t.advantages), 0.0, weight)


def quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """A quantile of each sequence's values in [0, 1], interpolated as by numpy: (sequences, 1); 0 without tokens.

    It halves the range instead of sorting, which an accelerator would do apart from everything else.
    """
    number = mask.sum(-1, keepdim=True)
    place = share * (number - 1).clamp(min=0).to(values.dtype)
    first = place.floor()
    low = torch.zeros_like(place)
    high = torch.ones_like(place)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = (mask & (values <= middle)).sum(-1, keepdim=True) > first
        low = where(enough, low, middle)
        high = where(enough, middle, high)
    within = mask & (values <= high)
    below = where(within, values, 0.0).amax(-1, keepdim=True)
    above = where(mask & ~within, values, math.inf).amin(-1, keepdim=True)
    above = where(within.sum(-1, keepdim=True) > first + 1, below, above).clamp(max=1.0)
    return where(number > 0, below + (place - first) * (above - below), 0.0)
