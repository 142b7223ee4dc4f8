"""Lopti (AR-Lopti, Algorithm 1): tokens of low probability are updated first, then the others, in two passes."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_clipx.base.histogram import bucket_of, first_reaching, whole_sums
from verl_clipx.base.parameters import boolean, choice, number, optional, parameter, validate

# Buckets of equal width in log-odds, an open one at either end: neighbouring edges differ by 1.4 % of the probability
# or of its distance to 1, whichever is smaller. Equal widths of the probability itself would put most tokens of a
# trained policy into the last bucket.
PROBABILITY_BUCKETS = 2048
SMALLEST_EDGE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Lopti:
    """Two passes over the rollout batch, each updating on its own group of tokens, or only the first of them."""

    node: ClassVar[str] = "clipx.update"

    eta: float = parameter(
        0.5, number(at_least=1e-6, at_most=1), "tokens whose old probability is at most this are low-probability tokens"
    )
    equal: bool = parameter(
        True, boolean(), "whether a probability equal to eta counts as low (paper) or not (release)"
    )
    order: str = parameter(
        "low_first",
        choice("low_first", "high_first", "low_only"),
        "the group that is updated first (paper: low_first); low_only: the other group is not updated",
    )
    quantile: float | None = parameter(
        None,
        optional(number(at_least=1e-6, at_most=1)),
        "eta is the probability below which this share of the rollout batch's tokens lies; null: eta is used as given",
    )

    def __post_init__(self) -> None:
        validate(self, self.node)


def low_probability(old_log_prob: Tensor, *, eta: float | Tensor, equal: bool) -> Tensor:
    """The tokens of the low-probability group, compared in float64; the rest of the mask is the other group.

    Args:
        old_log_prob: under the old policy, (sequences, length), any float dtype.
        eta: the threshold on the probability, in (0, 1], or a 0-d tensor.
        equal: whether a probability of exactly eta counts as low. It does in the paper, but not in the released code.

    Source: AR-Lopti, Algorithm 1, lines 12 to 20.
    """
    probability = _probability(old_log_prob)
    return probability <= eta if equal else probability < eta


def probability_statistics(old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Additive statistics for `probability_quantile`: the histogram of the old policy's probabilities.

    Args:
        old_log_prob: under the old policy, (sequences, length), any float dtype.
        mask: bool or 0/1, (sequences, length).

    Returns:
        (PROBABILITY_BUCKETS,), float64: tokens per bucket. A bucket contains its upper edge; the first and the last one
        reach to 0 and 1.
    """
    bucket = bucket_of(_probability(old_log_prob), _inner_edges(old_log_prob.device))
    return whole_sums(bucket, mask.bool(), PROBABILITY_BUCKETS).sum(0)


def probability_quantile(statistics: Tensor, *, portion: float) -> Tensor:
    """The threshold eta below which a given portion of the tokens lies, without a host sync.

    Args:
        statistics: sum of `probability_statistics` over any tokens, (PROBABILITY_BUCKETS,).
        portion: in (0, 1].

    Returns:
        0-d float64: the smallest bucket edge with at least `portion` of the tokens at or below it, for
        `low_probability` with `equal=True`; the first edge if there are no tokens.

    Source: the quantile variant of AR-Lopti's released code (its eta = 0), here to the width of a bucket.
    """
    index, _ = first_reaching(statistics, portion)
    upper_edges = torch.nn.functional.pad(_inner_edges(statistics.device), (0, 1), value=1.0)
    return upper_edges.gather(0, index.reshape(1)).squeeze(0)


def _probability(log_prob: Tensor) -> Tensor:
    # Rounding can put a log-probability above 0.
    return log_prob.detach().to(torch.float64).clamp(max=0.0).exp()


def _inner_edges(device: torch.device) -> Tensor:
    limit = math.log((1.0 - SMALLEST_EDGE) / SMALLEST_EDGE)
    return torch.linspace(-limit, limit, PROBABILITY_BUCKETS - 1, dtype=torch.float64, device=device).sigmoid()
