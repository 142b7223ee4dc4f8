"""KL-Cov (arXiv 2505.22617): a penalty on the tokens whose advantage and log-probability go together most."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, cat, where

from verl_clipx.losses.base.histogram import bucket_of, ratio_or_zero, whole_sums
from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.base.parameters import VerlKey, number, parameter
from verl_clipx.losses.base.pull import WithPull
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.methods.clip_cov import (
    FIRST_STAGE_SIZE,
    MethodWithMeans,
    compute_covariances,
    compute_means,
    hash_to_uniform,
)

# The histogram of covariances: buckets of equal logarithmic width, 0.8 %, between the two edges, an open one below and
# an open one above.
BUCKETS = 2048
LOWEST_EDGE = 1e-4
HIGHEST_EDGE = 1e3


@dataclass(frozen=True, kw_only=True)
class KlCov(
    MethodWithMeans, WithPull, name="kl_cov", source="The Entropy Mechanism (arXiv 2505.22617), KL-Cov; verl's"
):
    """No bounds on the ratio; the tokens of highest covariance are pulled back to the old policy.

    F = r, and r - coefficient * sign(log r) / A for the share of the tokens with the highest covariance of advantage
    and log-probability over the mini-batch. Covariances are counted in buckets (0.8 % wide; all up to 1e-4 share one).
    From the bucket in which the share ends, as many tokens as it still lacks are drawn on average, as by `clip_cov`.

    verl takes the tokens with the highest covariance in each micro-batch, about the micro-batch's means. Where A is 0
    there is no penalty here, while verl has one.
    """

    logs = (
        of_decision(
            "covariance_bound",
            "tokens with a covariance above this are penalised, some of those up to 0.8 % above it",
            "nats times advantage",
        ),
    )

    share: float = parameter(
        2e-4,
        number(above=0, at_most=1),
        "the share of the tokens that are penalised",
        "paper",
        VerlKey(("policy_loss.kl_cov_ratio",)),
    )
    coefficient: float = parameter(
        1.0,
        number(at_least=0, at_most=1e4),
        "of the penalty |log r|; 1 as in the paper and in the default of verl's function, while its YAML has 0.1",
        "paper",
        VerlKey(("policy_loss.ppo_kl_coef",)),
        role="penalty",
    )

    second_statistics_size = BUCKETS

    def second_statistics(self, t: Tokens, first: Tensor) -> Tensor:
        """Return the histogram of the covariances: (BUCKETS,), float64."""
        bucket = bucket_of(compute_covariances(t, compute_means(first)), inner_edges(first.device))
        # All tokens are counted as one sequence, because the counts of each sequence would take more memory than the
        # tokens.
        return whole_sums(bucket.reshape(1, -1), t.mask.reshape(1, -1), BUCKETS)[0]

    def decide(self, statistics: Tensor) -> Tensor:
        """Find the bucket of covariances in which the share ends, counted from the highest one down.

        Args:
            statistics: the three sums of `MethodWithMeans.statistics`, then the histogram of the covariances.

        Returns:
            (5,), float64: the two means, the lower and the upper edge of that bucket, and the part of its tokens that
            is penalised.
        """
        token_count = statistics[:1]
        counts = statistics[FIRST_STAGE_SIZE:]
        # At least one token, as in verl.
        wanted = (self.share * token_count).floor().clamp(min=1.0)
        # Entry k is the number of tokens in the bucket that lies k buckets below the highest one, and in all above it.
        count_from_above = counts.flip(0).cumsum(0)
        steps_down = (count_from_above < wanted).sum(0, keepdim=True).clamp(max=BUCKETS - 1)
        last = BUCKETS - 1 - steps_down
        infinity = torch.full_like(counts[:1], torch.inf)
        edges = cat([-infinity, inner_edges(statistics.device), infinity])
        low = edges.gather(0, last)
        high = edges.gather(0, last + 1)
        count_in_last = counts.gather(0, last)
        wanted_of_last = wanted - count_from_above.gather(0, steps_down) + count_in_last
        part = ratio_or_zero(wanted_of_last, count_in_last)
        return cat([compute_means(statistics), low, high, part])

    def bounded(self, t: Tokens) -> Tensor:
        """Return the log-probability. Together with the advantage, it says whether a covariance is above its bound."""
        return t.log_prob

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return bounds on the log-probability beyond which the token's covariance is above its bound.

        With A above its mean, the covariance rises with the log-probability, and the upper bound acts. With A below its
        mean, the covariance falls with the log-probability, and the lower bound acts.
        """
        mean_advantage, mean_log_prob, low, high, part = decision.to(t.ratio.dtype).unbind()
        # Of the last bucket, a random part is penalised. The drawn tokens have its lower edge as the bound of their
        # covariance, and all others its upper edge.
        is_drawn = hash_to_uniform(t.old_log_prob, seed=0) < part
        covariance_bound = where(is_drawn, low, high)
        deviation = t.advantages - mean_advantage
        log_prob_bound = mean_log_prob + covariance_bound / where(deviation == 0, 1.0, deviation)
        # With A at its mean, the covariance is 0 at every log-probability. Every token is above a negative bound, and
        # none is above another one.
        bound_at_mean = where(covariance_bound < 0, -math.inf, math.inf)
        high_unless_above = where(deviation < 0, math.inf, bound_at_mean)
        return Bounds(
            low=where(deviation < 0, log_prob_bound, -math.inf),
            high=where(deviation > 0, log_prob_bound, high_unless_above),
        )

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        lower_edge = decision[2]
        # The first bucket has no lower edge, and -infinity could not be averaged.
        return {"covariance_bound": lower_edge.clamp(min=-1.0)}

    def find_penalised(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return the tokens that are pulled back: bool, (sequences, length)."""
        is_beyond = (t.log_prob > bounds.high) | (t.log_prob < bounds.low)
        return is_beyond & (t.advantages != 0)

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        return where(t.unclamped, t.free_ratio, 0.0)

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return coefficient * |log r| where a token is penalised, and its derivative with respect to log_prob."""
        is_penalised = self.find_penalised(t, bounds)
        penalty = where(is_penalised, self.coefficient * t.log_ratio.abs(), 0.0)
        # Where the clamp acts, the log-ratio does not change with log_prob.
        derivative = where(is_penalised & t.unclamped, self.coefficient * t.log_ratio.sign(), 0.0)
        return penalty, derivative

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return the penalty minus A r."""
        penalty, _ = self.pull_on(t, bounds)
        return penalty - t.advantages * t.ratio


def inner_edges(device: torch.device | str) -> Tensor:
    """Return the upper edges of all buckets but the last: ascending, (BUCKETS - 1,), float64."""
    # Made on the device, because copying a list there would wait for it.
    number = torch.arange(BUCKETS - 1, dtype=torch.float64, device=device)
    log_width = math.log(HIGHEST_EDGE / LOWEST_EDGE) / (BUCKETS - 2)
    return (number * log_width + math.log(LOWEST_EDGE)).exp()
