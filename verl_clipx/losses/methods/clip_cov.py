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

# A token's random number is made of this many bits of its hash, which are as many as float32 holds exactly.
HASH_BITS = 24

# How many statistics the first stage has. The means follow from them.
FIRST_STAGE_SIZE = 3


class MethodWithMeans(Method):
    """A method in two stages: sums, from which the means of A and log p follow, and statistics about these means."""

    statistics_size = FIRST_STAGE_SIZE
    # The number of tokens.
    never_negative = slice(1)

    def statistics(self, t: Tokens) -> Tensor:
        """Return the number of tokens, the sum of their advantages and the sum of their log-probabilities.

        Returns:
            (FIRST_STAGE_SIZE,), float64.
        """
        counts = number_in(t.mask).to(torch.float64)
        advantages = where(t.mask, t.advantages, 0.0).to(torch.float64)
        log_probs = where(t.mask, t.log_prob, 0.0).to(torch.float64)
        # Each of `parts` is summed first, because the compiler then reads the tokens once.
        return stack([counts, parts(advantages).sum(-1), parts(log_probs).sum(-1)]).sum(-1)


def covariance_parameter(default: float, side: str, key: str) -> Any:
    """Return a parameter that bounds the covariance of the tokens that are eligible.

    Args:
        default: its default, in nats times advantage.
        side: the side of the bound on which tokens are eligible, "above" or "below".
        key: the end of the name of verl's key.
    """
    allowed = number(at_least=-1e4, at_most=1e4)
    meaning = f"tokens with a covariance {side} this are eligible"
    return parameter(default, allowed, meaning, "paper", VerlKey((f"policy_loss.clip_cov_{key}",)))


@dataclass(frozen=True, kw_only=True)
class ClipCov(
    MethodWithMeans,
    ClippedSurrogate,
    FixedBounds,
    name="clip_cov",
    source="The Entropy Mechanism (arXiv 2505.22617), Clip-Cov; verl's",
):
    """Takes the gradient of a random few of the tokens whose covariance lies between two bounds, besides PPO's clip.

    F is PPO's, but 0 for the tokens that are drawn. The bounds of a drawn token leave out every ratio, so that it is
    counted as clipped, unless its A is 0.

    A token is eligible if covariance_low < cov < covariance_high and PPO does not clip it. Of n tokens, share * n
    eligible ones are drawn on average, rounded down, but at least one and at most all of them. Whether a token is drawn
    follows from a hash of its old log-probability and its position, so it does not depend on how a mini-batch is
    divided. verl draws exactly that number in each micro-batch, and takes the covariance about the micro-batch's means.
    """

    # A drawn token has no gradient at any ratio.
    unconstrained_weight = True

    logs = (
        of_decision(
            "eligible_share",
            "share of the tokens that are eligible: their covariance is between covariance_low and covariance_high, "
            "and PPO does not clip them",
            "fraction of tokens",
        ),
        of_decision("drawn_share", "the share of the eligible tokens that lose their gradient", "fraction"),
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
    seed: int = parameter(0, integer(at_least=0, at_most=2**31 - 1), "the seed of the draw", "choice")

    acts_at_ratio_one = True

    second_statistics_size = 1

    def second_statistics(self, t: Tokens, first: Tensor) -> Tensor:
        """Return the number of eligible tokens: (1,), float64."""
        is_eligible = t.mask & self.find_eligible(t, compute_means(first))
        return number_in(is_eligible).sum(dtype=torch.float64)[None]

    def find_eligible(self, t: Tokens, means: Tensor) -> Tensor:
        """Return the tokens among which some are drawn: bool, (sequences, length).

        Args:
            t: the tokens.
            means: from `compute_means`.
        """
        # PPO's bounds, which are constants and don't read their last argument.
        is_clipped = FixedBounds.bounds(self, t, means).clipped(t.free_ratio, t.advantages)
        covariance = compute_covariances(t, means)
        return (covariance > self.covariance_low) & (covariance < self.covariance_high) & ~is_clipped

    def decide(self, statistics: Tensor) -> Tensor:
        """Return what determines which tokens are drawn.

        Args:
            statistics: the three sums of `MethodWithMeans.statistics`, then the number of eligible tokens.

        Returns:
            (4,), float64: the mean advantage, the mean log-probability, the share of the tokens that are eligible, and
            the probability with which an eligible token is drawn.
        """
        token_count = statistics[:1]
        eligible_count = statistics[FIRST_STAGE_SIZE:]
        # verl rounds down too, and draws at least one token.
        drawn_count = (self.share * token_count).floor().clamp(min=1.0)
        eligible_share = ratio_or_zero(eligible_count, token_count)
        probability = ratio_or_zero(drawn_count, eligible_count).clamp(max=1)
        return cat([compute_means(statistics), eligible_share, probability])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return PPO's bounds, and for drawn tokens bounds that clip every ratio."""
        fixed = FixedBounds.bounds(self, t, decision)
        is_drawn = self.find_drawn(t, decision)
        # With A < 0, every ratio is below the bound infinity; with A > 0, every ratio is above the bound 0.
        always_clipped = where(t.advantages < 0, torch.inf, 0.0).to(t.ratio.dtype)
        return Bounds(low=where(is_drawn, always_clipped, fixed.low), high=where(is_drawn, always_clipped, fixed.high))

    def find_drawn(self, t: Tokens, decision: Tensor) -> Tensor:
        """Return the tokens that lose their gradient: bool, (sequences, length).

        Args:
            t: the tokens.
            decision: from `decide`: it begins with the two means and ends with the probability of a draw.
        """
        means = decision[:2]
        probability = decision[-1].to(t.ratio.dtype)
        return self.find_eligible(t, means) & (hash_to_uniform(t.old_log_prob, self.seed) < probability)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        _, _, eligible_share, probability = decision.unbind()
        return {"eligible_share": eligible_share, "drawn_share": probability}

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        # A drawn token with A < 0 has an infinite lower bound, whose product with A would be infinite too.
        return where(bounds.low.isinf(), 0.0, super().loss_value(t, bounds, weight))


def hash_to_uniform(values: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random number in [0, 1) for each token that depends only on its value, its position and the seed.

    The number is a hash, so it does not depend on how a mini-batch is divided, and needs no generator.

    Args:
        values: float32 or float64, (sequences, length). They are hashed in float32.
        seed: in [0, 2^31).

    Returns:
        (sequences, length), in the values' dtype.
    """
    mixed = values.to(torch.float32).view(torch.int32).to(torch.int64)
    position = torch.arange(values.shape[-1], device=values.device)
    # A common hash of 32-bit integers: multiplications by odd numbers, and shifts that spread every bit over all bits.
    mixed = (mixed ^ (position * 0x9E3779B1) ^ (seed * 0x85EBCA6B)) & 0xFFFFFFFF
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)).mul_(0x45D9F3B) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 16)) & (2**HASH_BITS - 1)
    return mixed.to(values.dtype) / 2**HASH_BITS


def compute_means(sums: Tensor) -> Tensor:
    """Return the mean advantage and the mean log-probability: (2,), float64; 0 without tokens.

    Args:
        sums: the sums of `MethodWithMeans.statistics`; any statistics after them are ignored.
    """
    return ratio_or_zero(sums[1:FIRST_STAGE_SIZE], sums[:1])


def compute_covariances(t: Tokens, means: Tensor) -> Tensor:
    """Return (A - mean A) * (log p - mean log p) of each token, (sequences, length)."""
    mean_advantage, mean_log_prob = means.to(t.ratio.dtype).unbind()
    return (t.advantages - mean_advantage) * (t.log_prob - mean_log_prob)
