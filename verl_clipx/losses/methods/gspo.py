"""GSPO (arXiv 2507.18071): PPO's clip on one ratio for a whole sequence, the geometric mean of its tokens' ratios."""

import math
from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, FixedBounds, clamp_parameter, lower_bound, upper_bound
from verl_clipx.losses.base.parameters import LOWER_WIDTH, UPPER_WIDTH
from verl_clipx.losses.base.tokens import Tokens, saturate
from verl_clipx.losses.base.width import Width

# Why a bound outside the usual range of a sequence's ratio is refused if it comes from verl's keys.
OF_TOKENS = "the ratio of a sequence stays close to 1, so that bounds for the ratios of tokens would clip nothing"


@dataclass(frozen=True, kw_only=True)
class Gspo(FixedBounds, name="gspo", source="GSPO (arXiv 2507.18071), Eq. 5 and 7; per token as in Eq. 13-14"):
    """PPO's clip on the ratio of the whole sequence.

    s = exp(mean of log r over the sequence's tokens). F = 0 where A > 0 and s > high, where A < 0 and s < low, and
    where log s > log_ratio_clamp. Elsewhere F = s. With seq-mean-token-mean, this is the gradient of Eq. 5.
    """

    by_sequence = True
    bounds_on = "sequence's ratio"
    # The ratio of a sequence stays close to 1.
    bounds_width = Width(floor=1e-5, ceiling=0.05)

    clip_low: float | None = lower_bound(
        0.9997, "paper", LOWER_WIDTH._replace(usual_because=OF_TOKENS), quantity=bounds_on, usual=(0.99, 1)
    )
    clip_high: float | None = upper_bound(
        1.0004, "paper", UPPER_WIDTH._replace(usual_because=OF_TOKENS), quantity=bounds_on, usual=(1, 1.01)
    )
    log_ratio_clamp: float | None = clamp_parameter(
        10.0, "a sequence's log-ratio above this counts as this and gets no gradient, as in verl (10); null: no limit"
    )

    def bounded(self, t: Tokens) -> Tensor:
        """Return the sequence's ratio s at each of its tokens, (sequences, length)."""
        highest = math.inf if self.log_ratio_clamp is None else self.log_ratio_clamp
        return self._log_ratio(t).clamp(max=highest).exp().expand_as(t.ratio)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        s = self.bounded(t)
        is_clipped = bounds.clipped(s, t.advantages)
        if self.log_ratio_clamp is not None:
            is_clipped = is_clipped | (self._log_ratio(t) > self.log_ratio_clamp)
        return where(is_clipped, 0.0, s)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return max(-A s, -A clip(s))."""
        return bounds.surrogate(self.bounded(t), t.advantages)

    def _log_ratio(self, t: Tokens) -> Tensor:
        """Return the mean log-ratio of each sequence, (sequences, 1), saturated.

        As in verl, log_ratio_clamp acts on this mean, and not on the log-ratio of each token.
        """
        return saturate(t.sequence_mean(t.log_prob - t.old_log_prob))
