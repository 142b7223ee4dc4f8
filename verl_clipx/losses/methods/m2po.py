"""M2PO (arXiv 2510.01161): masks the tokens farthest from the policy that sampled until the rest are near enough."""

from dataclasses import dataclass

import torch
from torch import Tensor, cat, int64, where

from verl_clipx.losses.base.histogram import LARGEST, Octaves, ratio_or_zero
from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.metric import of_decision, of_rollout_batch
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.base.tokens import Tokens, saturate

# The buckets of |log-ratio|, from 2^-10 to 2^6, which is LARGEST.
OCTAVES = Octaves(lowest=-10, count=16)


@dataclass(frozen=True, kw_only=True)
class M2po(Method, name="m2po", source="M2PO (arXiv 2510.01161), Algorithm 1"):
    """Masks the tokens with the largest log-ratios, so that the others' second moment is at most a threshold.

    F = 0 where A > 0 and log r > tau, and where A < 0 and log r < -tau. Elsewhere F = r, which is the ratio of the
    current policy to the one that sampled.

    PPO's clip acts on tokens with A > 0 and r > 1 and on tokens with A < 0 and r < 1. Those of them with
    |log r| <= tau have a mean (log r)^2 of at most `threshold`. tau is the largest edge of a bucket of |log r| for
    which this holds, which is at most one bucket (1.6 %) below what sorting the tokens would give.

    Source: moment "kept" is the paper's Algorithm 1. Moment "capped", the mean of min((log r)^2, tau^2) over all
    tokens that PPO's clip acts on, and behaviour "old" are the authors' released code.
    """

    logs = (
        of_decision(
            "log_ratio_bound",
            "among the tokens that PPO's clip acts on, those with a larger log-ratio are masked; 64 if none is",
            "nats",
            chart="bound on the log-ratio",
        ),
        of_rollout_batch("log_ratio_bound_lowest", "the narrowest such bound in the rollout batch", "nats"),
        of_rollout_batch(
            "log_ratio_bound_last",
            "the bound of the rollout batch's last update",
            "nats",
            chart="bound on the log-ratio",
        ),
        of_decision("second_moment_before", "mean squared log-ratio of the tokens that PPO's clip acts on", "nats²"),
        of_decision("second_moment_after", "the same after masking", "nats²"),
        of_decision("masked_share", "which share of the tokens that PPO's clip acts on is masked", "fraction"),
    )

    bounds_on = "log-ratio"
    formula = ("-tau", "tau")
    symbols = "the largest tau with a second moment of at most {threshold}"

    threshold: float = parameter(
        0.04, number(at_least=1e-4, at_most=1), "largest second moment of the log-ratio (the paper's tau_M2)", "paper"
    )
    moment: str = parameter(
        "kept",
        choice("kept", "capped"),
        "the second moment of the tokens that are kept (paper), or of all, masked ones capped at the bound (release)",
        "paper",
    )
    behaviour: str = parameter(
        "rollout",
        choice("rollout", "old"),
        "the policy that ratios are taken to: the one that sampled (paper), or verl's old policy (release)",
        "paper",
    )

    @property
    def ratio_to_sampler(self) -> bool:
        return self.behaviour == "rollout"

    @property
    def asks_for(self) -> tuple[str, ...]:
        return ("rollout_log_prob",) if self.behaviour == "rollout" else ()

    def bounded(self, t: Tokens) -> Tensor:
        """Return the log-ratio to the policy that `behaviour` chooses, (sequences, length)."""
        sampler_log_prob = t.rollout_log_prob if self.behaviour == "rollout" else t.old_log_prob
        return saturate(t.log_prob - sampler_log_prob)

    never_negative = slice(None)
    statistics_size = 2 * OCTAVES.buckets

    def statistics(self, t: Tokens) -> Tensor:
        """Count the tokens that PPO's clip acts on, and sum their (log r)^2, in each bucket of |log r|.

        Returns:
            (statistics_size,), float64: the number of these tokens in each bucket, then the sum of their (log r)^2 in
            each.
        """
        A = t.advantages
        log_ratio = self.bounded(t)
        is_rising = (A > 0) & (log_ratio > 0)
        is_falling = (A < 0) & (log_ratio < 0)
        return OCTAVES.counts_and_squares(log_ratio, t.mask & (is_rising | is_falling))

    def decide(self, statistics: Tensor) -> Tensor:
        """Choose tau, the largest edge at which the second moment is at most the threshold.

        Args:
            statistics: the sums of `statistics` over all tokens of the update.

        Returns:
            (4,), float64: tau, which is infinite if nothing is masked; the second moment before and after masking; the
            share of the tokens that is masked.
        """
        counts, squares = statistics.view(2, -1)
        # Each entry from here on is about one choice of tau: the upper edge of its bucket.
        kept_count = counts.cumsum(0)
        kept_squares = squares.cumsum(0)
        all_count = kept_count[-1:]
        all_squares = kept_squares[-1:]
        masked_count = all_count - kept_count
        edges = OCTAVES.edges(statistics.device)
        if self.moment == "kept":
            moment = ratio_or_zero(kept_squares, kept_count)
        else:
            # The last bucket has no upper edge, and needs none, because no token is masked where it is kept.
            caps = cat([edges, edges[-1:]])
            moment = ratio_or_zero(kept_squares + masked_count * caps.square(), all_count)
        # 1 up to the last edge before the first one that does not fit, and 0 from there on. The first bucket always
        # fits, because its squares are at most 2^-20.
        fitting = (moment <= self.threshold).to(int64).cumprod(0)
        chosen = fitting.sum(0, keepdim=True) - 1
        tau = cat([edges, torch.full_like(edges[:1], torch.inf)]).gather(0, chosen)
        moment_before = ratio_or_zero(all_squares, all_count)
        moment_after = moment.gather(0, chosen)
        masked_share = ratio_or_zero(masked_count.gather(0, chosen), all_count)
        return cat([tau, moment_before, moment_after, masked_share])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        tau = decision.to(t.ratio.dtype)[0]
        return Bounds(-tau, tau)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        tau, moment_before, moment_after, masked_share = decision.unbind()
        return {
            "log_ratio_bound": tau.clamp(max=LARGEST),
            "second_moment_before": moment_before,
            "second_moment_after": moment_after,
            "masked_share": masked_share,
        }

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Return the narrowest bound of any update, and the last update's bound; nothing for one update."""
        bounds = metrics["log_ratio_bound"]
        if len(bounds) == 1:
            return {}
        return {"log_ratio_bound_lowest": min(bounds), "log_ratio_bound_last": bounds[-1]}

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return the ratio to the policy that `behaviour` chooses, and 0 for masked tokens and beyond the clamp."""
        log_ratio = self.bounded(t)
        is_masked = bounds.clipped(log_ratio, t.advantages)
        if self.log_ratio_clamp is not None:
            is_masked = is_masked | (log_ratio.abs() > self.log_ratio_clamp)
        return where(is_masked, 0.0, log_ratio.exp())
