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


def sum_of_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each sequence's values in the mask, (sequences, 1)."""
    return values.where(mask, 0.0).sum(-1, keepdim=True)


def mean_of_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each sequence's values in the mask, (sequences, 1); 0 for a sequence without tokens."""
    # verl adds the same small number.
    return sum_of_sequence(values, mask) / (mask.sum(-1, keepdim=True) + 1e-8)


def max_of_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest of each sequence's values in the mask, (sequences, 1); -inf for a sequence without tokens."""
    return values.masked_fill(~mask, -math.inf).amax(-1, keepdim=True)


# From the first part of a criterion's name to how a sequence's divergence follows from those of its tokens.
OVER_SEQUENCE = {"seq_sum": sum_of_sequence, "seq_mean": mean_of_sequence, "seq_max": max_of_sequence}


@dataclass(frozen=True)
class Criterion:
    """One of verl's criteria: a token stays if its divergence, or its sequence's, is within limits.

    Args:
        level: "token" for the token's divergence, or a key of `OVER_SEQUENCE` for its sequence's.
        estimator: a key of `ESTIMATORS`.
        low, high: the smallest and the largest divergence with which a token stays.
    """

    level: str
    estimator: str
    low: float
    high: float

    def rejects(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens that are rejected.

        Args:
            log_ratio: the log-ratio of the current policy to the one that sampled, clamped, (sequences, length).
            mask: the response's tokens, bool, (sequences, length).

        Returns:
            bool, broadcastable to (sequences, length).
        """
        # The divergence of the policy that sampled from the current one, as in verl.
        divergence = ESTIMATORS[self.estimator](-log_ratio)
        if self.level != "token":
            divergence = OVER_SEQUENCE[self.level](divergence, mask)
        return (divergence < self.low) | (divergence > self.high)


@dataclass(frozen=True)
class Rejection:
    """The criteria of a run in bypass mode: a token stays if none rejects it."""

    criteria: tuple[Criterion, ...] = ()

    def remaining(self, mask: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """Return the tokens of the mask that stay: bool, (sequences, length).

        Args:
            mask: the response's tokens, bool, (sequences, length).
            log_prob, old_log_prob: under the current policy and the one that sampled, (sequences, length).
        """
        if not self.criteria:
            return mask
        log_ratio = log_prob.detach() - old_log_prob
        # A token whose log-ratio is not finite always stays. Without it, verl would not skip the step.
        is_finite = log_ratio.isfinite()
        clamped = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        is_rejected = torch.zeros_like(mask)
        for criterion in self.criteria:
            is_rejected = is_rejected | criterion.rejects(clamped, mask)
        return mask & ~(is_rejected & is_finite)


@functools.cache
def parse_criteria(names: str, thresholds: str) -> Rejection:
    """Parse criteria as verl writes them. The driver has already had verl check them.

    Args:
        names: criteria, separated by commas, such as "seq_mean_k1,token_k3".
        thresholds: one for all criteria, or one for each, separated by commas: the highest divergence. For k1 it is the
            lowest and the highest ratio, as in "0.5_2", or only the highest, whose inverse is then the lowest.
    """
    # Each name once, in the order in which they were given.
    different_names = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    threshold_of_each = [threshold.strip() for threshold in thresholds.split(",") if threshold.strip()]
    if len(threshold_of_each) == 1:
        threshold_of_each *= len(different_names)
    criteria = []
    for name, threshold in zip(different_names, threshold_of_each, strict=True):
        criteria.append(parse_criterion(name, threshold))
    return Rejection(criteria=tuple(criteria))


def parse_criterion(name: str, threshold: str) -> Criterion:
    """Return the criterion of a name and its threshold, both as for `parse_criteria`."""
    level, _, estimator = name.rpartition("_")
    if estimator != "k1":
        return Criterion(level=level, estimator=estimator, low=-math.inf, high=float(threshold))
    lowest_text, _, highest_text = threshold.rpartition("_")
    highest_ratio = float(highest_text)
    lowest_ratio = float(lowest_text) if lowest_text else 1 / highest_ratio
    return Criterion(level=level, estimator=estimator, low=math.log(lowest_ratio), high=math.log(highest_ratio))
