"""Rejection in bypass mode: the tokens that verl's rollout_rs keeps, by the current policy's ratio to the sampler.

In decoupled mode verl's trainer takes them out of response_mask before the worker gets it; in bypass mode only verl's
own bypass loss would, whose function waits for the accelerator a dozen times for its metrics. Here nothing waits.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_clipx.driver.support import BYPASS, ROLLOUT_RS, WITH_ROLLOUT_RS

# As verl: beyond it a log-ratio says nothing more.
LARGEST_LOG_RATIO = 20.0

# The estimators of a token's divergence, of the log-ratio.
ESTIMATORS = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: log_ratio.exp() - 1.0 - log_ratio,
}
# What is made of those of a sequence's tokens, by the first part of a criterion's name: (sequences, 1).
OVER_SEQUENCE = {
    "seq_sum": lambda values, mask: values.where(mask, 0.0).sum(-1, keepdim=True),
    # As verl, whose mean of no tokens is 0.
    "seq_mean": lambda values, mask: (
        values.where(mask, 0.0).sum(-1, keepdim=True) / (mask.sum(-1, keepdim=True) + 1e-8)
    ),
    "seq_max": lambda values, mask: values.masked_fill(~mask, -math.inf).amax(-1, keepdim=True),
}


@dataclass(frozen=True)
class Criterion:
    """One of verl's: a token stays while its divergence, or its sequence's, is within limits.

    Args:
        level: token, or a key of `OVER_SEQUENCE`.
        estimator: a key of `ESTIMATORS`.
        low, high: the limits, which stay.
    """

    level: str
    estimator: str
    low: float
    high: float

    def rejects(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Bool, broadcastable to (sequences, length); arguments as for `Rejection.remaining`, clamped."""
        divergence = ESTIMATORS[self.estimator](log_ratio)
        if self.level != "token":
            divergence = OVER_SEQUENCE[self.level](divergence, mask)
        return (divergence < self.low) | (divergence > self.high)


@dataclass(frozen=True)
class Rejection:
    """What a run rejects in bypass mode: a token stays if no criterion rejects it."""

    criteria: tuple[Criterion, ...] = ()

    def remaining(self, mask: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """The tokens that stay: bool, (sequences, length); the mask itself where nothing is rejected.

        Args:
            mask: bool, (sequences, length).
            log_prob, old_log_prob: of the current policy and of the sampler, (sequences, length); no gradient flows.
        """
        if not self.criteria:
            return mask
        log_ratio = log_prob.detach() - old_log_prob
        # A token that is not finite stays, wherever its sequence lies: left out, it would not make verl skip the step.
        finite, clamped = log_ratio.isfinite(), log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        rejected = torch.zeros_like(mask)
        for criterion in self.criteria:
            rejected = rejected | criterion.rejects(clamped, mask)
        return mask & ~(rejected & finite)


NOTHING_REJECTED = Rejection()


def rejection_of(policy_loss: Any) -> Rejection:
    """What the loss of a run has to reject; nothing outside bypass mode, where verl's trainer has done it already.

    Args:
        policy_loss: verl's policy-loss node.
    """
    options = getattr(getattr(policy_loss, "run", None), "options", {})
    if not options.get(BYPASS) or options.get(ROLLOUT_RS) is None:
        return NOTHING_REJECTED
    return parsed(str(options[ROLLOUT_RS]), str(options.get(WITH_ROLLOUT_RS[0])))


@functools.cache
def parsed(names: str, thresholds: str) -> Rejection:
    """verl's way to write criteria, which the driver has had verl check.

    Args:
        names: of criteria, separated by commas, such as "seq_mean_k1,token_k3".
        thresholds: one for all or one each: the highest divergence; of k1 lowest and highest ratio, "0.5_2", or the
            highest, whose inverse is the lowest.
    """
    criteria = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    given = [threshold.strip() for threshold in thresholds.split(",") if threshold.strip()]
    if len(given) == 1:
        given *= len(criteria)
    return Rejection(tuple(criterion(*pair) for pair in zip(criteria, given, strict=True)))


def criterion(name: str, threshold: str) -> Criterion:
    """One criterion with its threshold, as for `parsed`."""
    level, _, estimator = name.rpartition("_")
    if estimator != "k1":
        return Criterion(level, estimator, -math.inf, float(threshold))
    low, _, high = threshold.rpartition("_")
    return Criterion(level, estimator, math.log(float(low or 1 / float(high))), math.log(float(high)))
