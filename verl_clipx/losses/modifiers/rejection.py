"""Rejects tokens by their ratio to the policy that sampled them, by verl's criteria for rollout_rs.

verl's own function waits for the accelerator a dozen times for its metrics. Here nothing waits.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_clipx.losses.base.pull import ESTIMATORS
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO

# How a sequence's divergence follows from those of its tokens, by the first part of a criterion's name: (sequences, 1).
OVER_SEQUENCE = {
    "seq_sum": lambda values, mask: values.where(mask, 0.0).sum(-1, keepdim=True),
    # As in verl, the mean of no tokens is 0.
    "seq_mean": lambda values, mask: (
        values.where(mask, 0.0).sum(-1, keepdim=True) / (mask.sum(-1, keepdim=True) + 1e-8)
    ),
    "seq_max": lambda values, mask: values.masked_fill(~mask, -math.inf).amax(-1, keepdim=True),
}


@dataclass(frozen=True)
class Criterion:
    """One of verl's criteria: a token stays if its divergence, or its sequence's, is within limits.

    Args:
        level: "token", or a key of `OVER_SEQUENCE`.
        estimator: a key of `ESTIMATORS`.
        low, high: the smallest and the largest divergence that stays.
    """

    level: str
    estimator: str
    low: float
    high: float

    def rejects(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Returns the tokens that are rejected, by clamped log-ratios: bool, broadcastable to (sequences, length)."""
        # Of the policy that sampled from the current one.
        divergence = ESTIMATORS[self.estimator](-log_ratio)
        if self.level != "token":
            divergence = OVER_SEQUENCE[self.level](divergence, mask)
        return (divergence < self.low) | (divergence > self.high)


@dataclass(frozen=True)
class Rejection:
    """The criteria of a run in bypass mode: a token stays if none rejects it."""

    criteria: tuple[Criterion, ...] = ()

    def remaining(self, mask: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """The tokens of the mask that stay: bool, (sequences, length).

        Args:
            log_prob, old_log_prob: under the current policy and the one that sampled, (sequences, length).
        """
        if not self.criteria:
            return mask
        log_ratio = log_prob.detach() - old_log_prob
        # A token whose log-ratio is not finite always stays. Without it, verl would not skip the step.
        finite = log_ratio.isfinite()
        clamped = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        rejected = torch.zeros_like(mask)
        for criterion in self.criteria:
            rejected = rejected | criterion.rejects(clamped, mask)
        return mask & ~(rejected & finite)


@functools.cache
def parse_criteria(names: str, thresholds: str) -> Rejection:
    """Parses criteria as verl writes them; the driver has already had verl check them.

    Args:
        names: criteria, separated by commas, such as "seq_mean_k1,token_k3".
        thresholds: one for all criteria, or one for each, separated by commas: the highest divergence. For k1 it is the
            lowest and the highest ratio, as in "0.5_2", or only the highest, whose inverse is then the lowest.
    """
    criteria = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    given = [threshold.strip() for threshold in thresholds.split(",") if threshold.strip()]
    if len(given) == 1:
        given *= len(criteria)
    return Rejection(tuple(parse_criterion(*pair) for pair in zip(criteria, given, strict=True)))


def parse_criterion(name: str, threshold: str) -> Criterion:
    """One criterion, from its name and its threshold as for `parse_criteria`."""
    level, _, estimator = name.rpartition("_")
    if estimator != "k1":
        return Criterion(level, estimator, -math.inf, float(threshold))
    low, _, high = threshold.rpartition("_")
    return Criterion(level, estimator, math.log(float(low or 1 / float(high))), math.log(float(high)))
