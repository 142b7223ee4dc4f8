"""Rules for a mask: each takes tokens or whole sequences out of the objective, under any method.

A masked token has neither loss nor gradient, and does not count in the statistics from which adaptive bounds follow.
The number that verl divides by stays the same, as in TRL. In ms-swift and SkyRL it is the number of tokens that are
left.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, where

from verl_clipx.losses.base.parameters import Parameters, number, optional, parameter
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, OPTIONAL, Inputs, compute_dtype, mean_over_sequence

# The largest ratio that occurs here, where log-ratios are clamped.
LARGEST_RATIO = math.exp(LARGEST_LOG_RATIO)


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask(Parameters):
    """Takes out sequences with negative advantages that the current policy finds much less likely than the sampler did.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), "off-policy sequence masking"; TRL's off_policy_mask_threshold.
    """

    node_key: ClassVar[str] = "clipx.mask"
    rule: ClassVar[str] = "opsm"
    # Whether the rule compares the policy of old_log_probs, and not the current policy, with the sampler.
    of_old_policy: ClassVar[bool] = False

    delta: float | None = parameter(
        None,
        optional(number(at_least=0, at_most=LARGEST_LOG_RATIO)),
        "a sequence with a negative mean advantage is taken out if the mean over its tokens of log(sampler / current "
        "policy) is above this",
        "choice",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is None:
            key = f"{self.node_key}.delta"
            advice = (
                f"Set {key}. TRL's documentation suggests 0.5. The 1e-4 of slime and miles is for a comparison of the "
                "sampler with a recomputed old policy."
            )
            raise Refusal(key, None, f"{self.rule} has no value that suits every run", advice)

    def find_dropped(self, inputs: Inputs) -> Tensor:
        """Return which sequences are taken out: bool, (sequences, 1)."""
        mean_advantage = mean_over_sequence(inputs.advantages, inputs.mask)
        mean_log_ratio = mean_over_sequence(inputs.rollout_log_prob - inputs.log_prob, inputs.mask)
        return (mean_advantage < 0) & (mean_log_ratio > self.delta)


@dataclass(frozen=True, kw_only=True)
class IcePop(Parameters):
    """Takes out tokens whose ratio of the old policy's to the sampler's probability lies outside [low, high].

    Source: IcePop (arXiv 2510.18855). verl's `rollout_is=token` with two thresholds also multiplies by the ratio.
    """

    node_key: ClassVar[str] = "clipx.mask"
    rule: ClassVar[str] = "icepop"
    of_old_policy: ClassVar[bool] = True

    low: float | None = parameter(
        0.5, optional(number(at_least=0, at_most=1)), "the smallest ratio that stays; null: none is too small", "choice"
    )
    high: float | None = parameter(
        5.0,
        optional(number(at_least=1, at_most=LARGEST_RATIO)),
        "the largest ratio that stays; null: none is too large",
        "choice",
    )

    def find_dropped(self, inputs: Inputs) -> Tensor:
        """Return which tokens are taken out: bool, (sequences, length)."""
        low = 0.0 if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        log_ratio = inputs.old_log_prob - inputs.rollout_log_prob
        ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        return (ratio < low) | (ratio > high)


Mask = OffPolicySequenceMask | IcePop


def apply_mask_rule(rule: Mask | None, inputs: Inputs) -> Tensor:
    """Return the tokens of the mask that a rule leaves: bool, (sequences, length).

    A token with a value that is not finite always stays, because verl skips the step only if it sees that token's loss.

    Args:
        rule: the rule; None leaves all tokens of `inputs.mask`.
        inputs: the micro-batch, with whole sequences; with rollout_log_prob if there is a rule.
    """
    if rule is None:
        return inputs.mask
    dtype = compute_dtype(inputs.log_prob.dtype)
    fields = {}
    for name in ("log_prob", "old_log_prob", "advantages", *OPTIONAL):
        values = getattr(inputs, name)
        if values is not None and values.is_floating_point():
            # 0 outside the mask, where a value may be anything, NaN included.
            fields[name] = where(inputs.mask, values.detach().to(dtype), 0.0)
    is_finite = torch.stack(list(fields.values())).isfinite().all(0)
    # A rule may drop whole sequences, (sequences, 1). Their tokens that are not finite stay too.
    is_dropped = rule.find_dropped(inputs._replace(**fields)) & is_finite
    return inputs.mask & ~is_dropped
