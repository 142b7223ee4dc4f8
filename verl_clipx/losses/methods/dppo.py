"""DPPO (arXiv 2602.04879): PPO's mask by how far the token's probability moved, instead of by the ratio."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, where

from verl_clipx.losses.base.method import DUAL_CLIP, Bounds, ConstantWeight, limit_parameter
from verl_clipx.losses.base.parameters import VerlKey, choice, number, optional, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width

# Added to 1 - p and to 1 - q, as in the release, because the paper's formula is 0/0 where both are 0.
SMALLEST = 1e-8


def threshold_parameter(side: str, which: str) -> Any:
    """Return a parameter that is the largest divergence of the tokens that are kept on one side.

    Args:
        side: "low", for tokens with A < 0 that became less likely, or "high", for those with A > 0 that became more so.
        which: these tokens, in words, as part of the parameter's meaning.
    """
    meaning = f"tokens with {which} by a larger divergence are dropped; null: no token"
    verl = VerlKey((f"clip_ratio_{side}",), fallback="clip_ratio")
    return parameter(0.2, optional(number(at_least=0, at_most=1)), meaning, "paper", verl, role=side)


@dataclass(frozen=True, kw_only=True)
class Dppo(ConstantWeight, name="dppo", source="DPPO (arXiv 2602.04879v3), Eq. 12, its D by Eq. 13 (tv) or 14 (kl)"):
    """Drops tokens by the divergence from the old policy.

    The divergence D has a sign: it is below 0 where the token's probability p is lower than q, that of the old policy.

        tv:  D = p - q
        kl:  |D| = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    F = 0 where A > 0 and D > threshold_high, and where A < 0 and D < -threshold_low. Elsewhere
    F = min(r, weight_high).
    """

    bounds_on = "divergence ({divergence}) of the token's probability"
    formula = ("-{threshold_low}", "{threshold_high}")
    bounds_width = Width(
        quantity="difference",
        parameters=("threshold_low", "threshold_high"),
        only_with=(("divergence", "tv"),),
    )

    divergence: str = parameter(
        "tv",
        choice("tv", "kl"),
        "the divergence of the sampled token against all others: tv (total variation) or kl (of the old policy from "
        "the current)",
        "paper",
    )
    threshold_low: float | None = threshold_parameter("low", "A < 0 whose probability fell")
    threshold_high: float | None = threshold_parameter("high", "A > 0 whose probability rose")
    weight_high: float | None = limit_parameter(
        5.0, "upper bound of the ratio as a weight; null: no bound", "paper", DUAL_CLIP
    )

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return the bounds -threshold_low and threshold_high on D."""
        low = -math.inf if self.threshold_low is None else -self.threshold_low
        high = math.inf if self.threshold_high is None else self.threshold_high
        return Bounds(low, high)

    def bounded(self, t: Tokens) -> Tensor:
        """Return the divergence D of each token, below 0 where the token became less likely: (sequences, length)."""
        # p under the current policy, q under the old one.
        p, q = t.probabilities
        if self.divergence == "tv":
            return p - q
        log_ratio_of_other_tokens = ((1 - q + SMALLEST) / (1 - p + SMALLEST)).log()
        kl = q * (t.old_log_prob - t.log_prob) + (1 - q) * log_ratio_of_other_tokens
        # A divergence is never negative, but rounding and SMALLEST can put it a little below 0.
        kl = kl.clamp(min=0.0)
        return where(p < q, -kl, kl)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        weight = t.ratio if self.weight_high is None else t.ratio.clamp(max=self.weight_high)
        is_dropped = bounds.clipped(self.bounded(t), t.advantages)
        return where(is_dropped, 0.0, weight)
