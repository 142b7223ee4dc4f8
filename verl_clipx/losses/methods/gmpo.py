"""GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each of which is clipped."""

import math
from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import LARGEST_BOUND, Bounds, FixedBounds, clamp_parameter, lower_bound, upper_bound
from verl_clipx.losses.base.parameters import ABOVE_ZERO, BELOW_ZERO, LOWER_WIDTH, UPPER_WIDTH
from verl_clipx.losses.base.tokens import Tokens, saturate


@dataclass(frozen=True, kw_only=True)
class Gmpo(FixedBounds, name="gmpo", source="GMPO (arXiv 2507.20673), Eq. 4"):
    """The geometric mean of the sequence's ratios, each clipped before the mean.

    s = exp(mean of log r over the sequence's tokens), where r counts as min(r, high) if A > 0 and as max(r, low)
    if A < 0. F = 0 at a token that is clipped, and F = s elsewhere. A belongs to the whole sequence, as in the paper.
    With seq-mean-token-mean, this is then the gradient of A s, averaged over sequences.
    """

    by_sequence = True

    # verl's geo_mean clips the log-ratio.
    clip_low: float | None = lower_bound(
        math.exp(-0.4), "paper", LOWER_WIDTH._replace(conversion=BELOW_ZERO), at_least=1 / LARGEST_BOUND
    )
    clip_high: float | None = upper_bound(math.exp(0.4), "paper", UPPER_WIDTH._replace(conversion=ABOVE_ZERO))
    log_ratio_clamp: float | None = clamp_parameter(
        None, "log importance-sampling ratios are clamped to plus or minus this; null: no clamp, as in verl's geo_mean"
    )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        return where(bounds.clipped(t.ratio, t.advantages), 0.0, self._geometric_mean(t, bounds))

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return -A s, also for a token that is clipped."""
        return -t.advantages * self._geometric_mean(t, bounds)

    def _geometric_mean(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return s at each token, (sequences, length)."""
        A = t.advantages
        log_low = math.log(bounds.low) if bounds.low > 0 else -math.inf
        log_high = math.log(bounds.high)
        clipped = where(A > 0, t.log_ratio.clamp(max=log_high), t.log_ratio.clamp(min=log_low))
        # A token with A = 0 counts with the ratio 1. In the paper, A is 0 at all tokens of a sequence or at none.
        clipped = where(A == 0, 0.0, clipped)
        return saturate(t.sequence_mean(clipped)).exp().expand_as(t.ratio)
