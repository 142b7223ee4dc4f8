"""Rejection in bypass mode: removes the tokens that verl's rollout_rs rejects by the current policy's ratio.

The ratio is relative to the policy that sampled. In decoupled mode verl's trainer removes the tokens from response_mask
before the worker gets it. In bypass mode only verl's own bypass loss would reject, with a function that waits for the
accelerator a dozen times for its metrics. Here nothing waits.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_clipx.run.support import BYPASS, ROLLOUT_RS, WITH_ROLLOUT_RS
from verl_clipx.worker.layout import padded

# verl clamps log-ratios to plus or minus this.
LARGEST_LOG_RATIO = 20.0

# The estimators of a token's divergence, as functions of its log-ratio.
ESTIMATORS = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: log_ratio.exp() - 1.0 - log_ratio,
}
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
        """Which tokens are rejected: bool, broadcastable to (sequences, length).

        Args:
            log_ratio: clamped, (sequences, length).
            mask: bool, (sequences, length).
        """
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
            log_prob, old_log_prob: under the current policy and the one that sampled, (sequences, length); detached.
        """
        if not self.criteria:
            return mask
        log_ratio = log_prob.detach() - old_log_prob
        # A token whose log-ratio is not finite always stays. Without it, verl would not skip the step.
        finite, clamped = log_ratio.isfinite(), log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        rejected = torch.zeros_like(mask)
        for criterion in self.criteria:
            rejected = rejected | criterion.rejects(clamped, mask)
        return mask & ~(rejected & finite)


NOTHING_REJECTED = Rejection()


def rejection_of(policy_loss: Any) -> Rejection:
    """What the loss of a run has to reject: nothing outside bypass mode, where verl's trainer has done it already.

    Args:
        policy_loss: verl's policy-loss node.
    """
    options = getattr(getattr(policy_loss, "run", None), "options", {})
    if not options.get(BYPASS) or options.get(ROLLOUT_RS) is None:
        return NOTHING_REJECTED
    return parsed(str(options[ROLLOUT_RS]), str(options.get(WITH_ROLLOUT_RS[0])))


def rejects_before(policy_loss: Any) -> bool:
    """Whether verl's trainer removes tokens from response_mask that verl's own token count still includes.

    Args:
        policy_loss: verl's policy-loss node.
    """
    options = policy_loss.run.options
    return options.get(ROLLOUT_RS) is not None and not options.get(BYPASS)


@functools.cache
def parsed(names: str, thresholds: str) -> Rejection:
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
    return Rejection(tuple(criterion(*pair) for pair in zip(criteria, given, strict=True)))


def criterion(name: str, threshold: str) -> Criterion:
    """One criterion, from its name and its threshold as for `parsed`."""
    level, _, estimator = name.rpartition("_")
    if estimator != "k1":
        return Criterion(level, estimator, -math.inf, float(threshold))
    low, _, high = threshold.rpartition("_")
    return Criterion(level, estimator, math.log(float(low or 1 / float(high))), math.log(float(high)))


def left_by_verl(options: Mapping[str, Any], mask: Tensor, log_ratio: Tensor) -> Tensor:
    """The tokens that verl's own code keeps: bool, (sequences, response length). It waits for the accelerator.

    Args:
        options: the run's keys of `support.READ` with their values.
        mask: all tokens of the responses, bool, (sequences, response length).
        log_ratio: relative to the rollout policy, (sequences, response length).
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names, threshold = options[ROLLOUT_RS], options.get(WITH_ROLLOUT_RS[0])
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def left_by_trainer(options: Mapping[str, Any], data: Any) -> Tensor:
    """The tokens that verl's trainer leaves in decoupled mode, or should have left as far as the data tell.

    Args:
        options: as for `left_by_verl`.
        data: verl's micro-batch.

    Returns:
        bool, (sequences, response length).
    """
    mask = padded(data["response_mask"]).bool()
    if not {"rollout_log_probs", "loss_mask"} <= set(data.keys()):
        return mask
    whole = padded(data["loss_mask"]).bool()
    # If the trainer rejects in both masks, a sequence's divergence can be computed only from the tokens that are left.
    if whole.shape != mask.shape or ("," in str(options[ROLLOUT_RS]) and torch.equal(whole, mask)):
        return mask
    # A jagged tensor that does not know its longest row is padded to the length of all rows together.
    old, rollout = (padded(data[key])[:, : mask.shape[1]] for key in ("old_log_probs", "rollout_log_probs"))
    return mask & left_by_verl(options, whole, old - rollout)
