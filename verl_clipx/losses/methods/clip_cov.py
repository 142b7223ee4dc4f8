"""Clip-Cov (arXiv 2505.22617): a few tokens whose advantage and log-probability go together lose their gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cat, stack, where

from verl_clipx.losses.base.histogram import ratio_or_zero
from verl_clipx.losses.base.method import Bounds, FixedBounds, Method
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.base.parameters import VerlKey, integer, number, parameter
from verl_clipx.losses.base.tokens import Tokens, number_in, parts
from verl_clipx.losses.methods.grpo import ClippedSurrogate

# Of a token's hash this many bits decide.
HASH_BITS = 24

# The length of the sums that the means follow from.
SUMS = 3


class AboutMeans(Method):
    """A method whose first statistics are sums for the means that its second ones are about."""

    statistics_size = SUMS
    never_negative = slice(1)

    def statistics(self, t: Tokens) -> Tensor:
        """Returns the number of tokens and the sums of their advantages and log-probabilities."""
        # Of each part first: a compiler then reads the tokens once.
        values = (where(t.mask, of, 0.0).to(torch.float64) for of in (t.advantages, t.log_prob))
        return stack([number_in(t.mask).to(torch.float64), *(parts(of).sum(-1) for of in values)]).sum(-1)


def covariance_parameter(default: float, side: str, key: str) -> Any:
    """A bound on the covariance of the tokens that are eligible; `key` ends the name of verl's."""
    allowed = number(at_least=-1e4, at_most=1e4)
    meaning = f"tokens with a covariance {side} this are eligible"
    return parameter(default, allowed, meaning, "paper", VerlKey((f"policy_loss.clip_cov_{key}",)))


@dataclass(frozen=True, kw_only=True)
class ClipCov(
    AboutMeans,
    ClippedSurrogate,
    FixedBounds,
    name="clip_cov",
    source="The Entropy Mechanism (arXiv 2505.22617), Clip-Cov; verl's",
):
    """Takes the gradient of a random few of the tokens whose covariance lies between two bounds, besides PPO's clip.

    F is that of PPO, and 0 for the tokens that are drawn. Their bounds are empty, so they are counted as clipped.

    A token is eligible if covariance_low < cov < covariance_high and PPO does not clip it. Of n tokens, share * n
    eligible ones are drawn on average. Whether a token is drawn follows from a hash of its old log-probability and its
    position, so that it does not depend on how a mini-batch is divided. verl draws exactly that many of each
    micro-batch, about the micro-batch's means.
    """

    # A drawn token has no gradient at any ratio.
    unconstrained_weight = True

    logs = (
        of_decision(
            "eligible_share", "share of the tokens whose covariance is between the bounds", "fraction of tokens"
        ),
        of_decision("drawn_share", "which share of the eligible tokens loses its gradient", "fraction"),
    )

    share: float = parameter(
        2e-4,
        number(above=0, at_most=1),
        "the share of the tokens that lose their gradient",
        "paper",
        VerlKey(("policy_loss.clip_cov_ratio",)),
        role="draw",
    )
    covariance_low: float = covariance_parameter(1.0, "above", "lb")
    covariance_high: float = covariance_parameter(5.0, "below", "ub")
    seed: int = parameter(0, integer(at_least=0, at_most=2**31 - 1), "of the draw", "choice")

    acts_at_ratio_one = True

    second_statistics_size = 1

    def second_statistics(self, t: Tokens, first: Tensor) -> Tensor:
        """The number of eligible tokens."""
        return number_in(t.mask & self.eligible(t, means_of(first))).sum(dtype=torch.float64)[None]

    def eligible(self, t: Tokens, means: Tensor) -> Tensor:
        """The tokens among which some are drawn: bool, (sequences, length)."""
        clipped = FixedBounds.bounds(self, t, means).clipped(t.free_ratio, t.advantages)
        covariance = covariances(t, means)
        return (covariance > self.covariance_low) & (covariance < self.covariance_high) & ~clipped

    def decide(self, statistics: Tensor) -> Tensor:
        """The two means; the share of the tokens that are eligible; the probability that an eligible token is drawn."""
        number = statistics[:1]
        eligible = statistics[SUMS:]
        wanted = (self.share * number).floor().clamp(min=1.0)
        return cat(
            [means_of(statistics), ratio_or_zero(eligible, number), ratio_or_zero(wanted, eligible).clamp(max=1)]
        )

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """PPO's bounds, and for drawn tokens bounds that no ratio is within."""
        fixed = FixedBounds.bounds(self, t, decision)
        drawn = self.drawn(t, decision)
        empty = where(t.advantages < 0, torch.inf, 0.0).to(t.ratio.dtype)
        return Bounds(where(drawn, empty, fixed.low), where(drawn, empty, fixed.high))

    def drawn(self, t: Tokens, decision: Tensor) -> Tensor:
        """The tokens that lose their gradient: bool, (sequences, length)."""
        probability = decision[3].to(t.ratio.dtype)
        return self.eligible(t, decision[:2]) & (uniform(t.old_log_prob, self.seed) < probability)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        return {"eligible_share": decision[2], "drawn_share": decision[3]}

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        # A drawn token with A < 0 has an infinite lower bound, whose product with A would be infinite too.
        return where(bounds.low.isinf(), 0.0, super().loss_value(t, bounds, weight))


def uniform(values: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each token, which follows from its value and its position: (sequences, length).

    Args:
        values: any float dtype, (sequences, length).
    """
    mixed = values.to(torch.float32).view(torch.int32).to(torch.int64)
    position = torch.arange(values.shape[-1], device=values.device)
    mixed = (mixed ^ position * 0x9E3779B1 ^ seed * 0x85EBCA6B) & 0xFFFFFFFF
    for _ in range(2):
        mixed = (mixed ^ mixed >> 16).mul_(0x45D9F3B) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) & 2**HASH_BITS - 1
    return mixed.to(values.dtype) / 2**HASH_BITS


def means_of(sums: Tensor) -> Tensor:
    """The mean advantage and the mean log-probability: (2,), float64; 0 without tokens."""
    return ratio_or_zero(sums[1:SUMS], sums[:1])


def covariances(t: Tokens, means: Tensor) -> Tensor:
    """(A - mean A) * (log p - mean log p) of each token, (sequences, length)."""
    mean_advantage, mean_log_prob = means.to(t.ratio.dtype).unbind()
    return (t.advantages - mean_advantage) * (t.log_prob - mean_log_prob)
