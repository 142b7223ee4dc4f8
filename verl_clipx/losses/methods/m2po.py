"""M2PO (arXiv 2510.01161): masks the tokens farthest from the policy that sampled until the rest are near enough."""

from dataclasses import dataclass

import torch
from torch import Tensor, cat, int64, where

from verl_clipx.losses.base.histogram import LARGEST, Octaves, ratio_or_zero
from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.metric import of_decision, of_rollout_batch
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.base.tokens import Tokens, saturate

# Of |log-ratio|, from 2^-10 to LARGEST.
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
        """The log-ratio to the policy that sampled."""
        behaviour = t.rollout_log_prob if self.behaviour == "rollout" else t.old_log_prob
        return saturate(t.log_prob - behaviour)

    never_negative = slice(None)
    statistics_size = 2 * OCTAVES.buckets

    def statistics(self, t: Tokens) -> Tensor:
        """For each bucket of |log r|: the number of tokens that PPO's clip acts on, then the sum of their (log r)^2."""
        A, x = t.advantages, self.bounded(t)
        counted = t.mask & (((A > 0) & (x > 0)) | ((A < 0) & (x < 0)))
        return OCTAVES.sums(x, counted)

    def decide(self, statistics: Tensor) -> Tensor:
        """tau, which is infinite if nothing is masked; the second moment before and after; the share that is masked."""
        of_buckets = statistics.view(2, -1)
        number, total = of_buckets.cumsum(1)
        inner = OCTAVES.edges(statistics.device)
        everyone, left = number[-1:], number[-1:] - number
        if self.moment == "kept":
            mean = ratio_or_zero(total, number)
        else:
            mean = ratio_or_zero(total + left * cat([inner, inner[-1:]]).square(), everyone)
        # The first bucket always fits: its squares are at most 2^-20.
        last = (mean <= self.threshold).to(int64).cumprod(0).sum(0, keepdim=True) - 1
        tau = cat([inner, torch.full_like(inner[:1], torch.inf)]).gather(0, last)
        before, after = ratio_or_zero(total[-1:], everyone), mean.gather(0, last)
        return cat([tau, before, after, ratio_or_zero(left.gather(0, last), everyone)])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        tau, _, _, _ = decision.to(t.ratio.dtype).unbind()
        return Bounds(-tau, tau)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        tau, before, after, masked = decision.unbind()
        return {
            "log_ratio_bound": tau.clamp(max=LARGEST),
            "second_moment_before": before,
            "second_moment_after": after,
            "masked_share": masked,
        }

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """The narrowest bound of any update, and the last update's."""
        bounds = metrics["log_ratio_bound"]
        if len(bounds) == 1:
            return {}
        return {"log_ratio_bound_lowest": min(bounds), "log_ratio_bound_last": bounds[-1]}

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        x = self.bounded(t)
        masked = bounds.clipped(x, t.advantages)
        if self.log_ratio_clamp is not None:
            masked = masked | (x.abs() > self.log_ratio_clamp)
        return where(masked, 0.0, x.exp())
