"""A sample instead of the whole mini-batch: its sequences, the error of its bounds, and the size of the next sample.

The error comes from half-samples. The sequences of the sample are divided into groups at random, and the bounds from
one half of the groups are compared with those from the other half. This is done for one division fewer than there are
groups, chosen so that any two groups are in the same half about as often as in different ones. For sums, the result is
exactly the variance between groups (balanced half-samples, McCarthy 1969). A half moves the bounds by about as much as
the sample itself is off. The error is therefore also valid for bounds that move in steps, such as BAPO's, which leaving
out a single group would not move. The next sample is smaller than this one, and its bounds may take a step that no half
takes. Therefore smaller parts of the sample decide how many sequences it needs.
"""

import math
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.loss.bounds import Probes

# The field of verl's mini-batch in which the worker keeps each sequence's group, so that it is cut together with it.
GROUP = "clipx_sampling_group"

# The number of groups in a sample, a power of two. With 31 degrees of freedom, a standard error is right to 13 %.
GROUPS = 32

# The smallest sample has this many sequences over all ranks: two in each group.
LEAST = 2 * GROUPS

# The number of small parts of the sample. A part differs from the sample by the square root of 15 times the sample's
# own error.
PARTS = 16

# The next sample is planned for the upper end of the variance's one-sided 95 % confidence interval: 31 divided by the
# 5 % quantile of the chi-squared distribution with 31 degrees of freedom.
MARGIN = 1.61


class Sample(NamedTuple):
    """The sequences of this rank's mini-batch that the extra pass takes.

    Args:
        rows: the indices of the sequences, int64, (sampled,), ascending.
        group: the group of each of these sequences, int64 in [0, GROUPS), (sampled,).
        sequences: the number of all sequences of this rank.
    """

    rows: Tensor
    group: Tensor
    sequences: int


def drawn(sequences: int, share: float, *, rank: int, ranks: int, seed: str) -> Sample:
    """Draws a share of a rank's sequences at random. With the same seed, a larger share contains the smaller ones.

    Args:
        sequences: the number of this rank's sequences.
        share: in (0, 1], the same on every rank.
        rank, ranks: the data-parallel rank and the number of ranks.
        seed: the same on every rank, and different for each update.
    """
    number = int.from_bytes(blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest(), "big") >> 1
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(number))
    sampled = min(sequences, max(math.ceil(share * sequences), math.ceil(LEAST / ranks)))
    # Numbered through over all ranks, so that the groups' sizes differ by at most one.
    group = (torch.arange(sampled) * ranks + rank) % GROUPS
    rows, first = order[:sampled].sort()
    return Sample(rows, group[first], sequences)


def by_group(statistics: Tensor, group: Tensor) -> Tensor:
    """Sums over the sequences of each group, (GROUPS, statistics_size).

    Args:
        statistics: of each sequence, (sequences, statistics_size), float64.
        group: of each sequence, int64, (sequences,); a sequence with a group outside [0, GROUPS) does not count.
    """
    # Not index_add_, whose order on a GPU, and with it the last bit, differs from call to call.
    member = group == torch.arange(GROUPS, device=group.device)[:, None]
    return member.to(statistics.dtype) @ statistics


def halves() -> Tensor:
    """Which groups are in each half, bool, (GROUPS - 1, GROUPS): all rows but the first of a Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUPS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix[1:] > 0


def standard_errors(method: Method, groups: Tensor, *, scale: float) -> Tensor:
    """Standard errors of the bounds that a sample leads to, relative to half their width, for an infinite population.

    Args:
        groups: sums over the sample's sequences by group, (GROUPS, statistics_size), float64.
        scale: the number of sequences in the mini-batch divided by that in the sample; sums are multiplied by it.

    Returns:
        The errors of the lower and the upper bound of every probe, (2, 2, PROBES).
    """
    probes, groups = Probes(method, groups.sum(0) * scale), groups * scale
    half = halves().to(groups.device)
    # The other half is added up and not subtracted from the whole, so that sums of 0 stay 0.
    pairs = zip(*((2 * (chosen.to(groups.dtype) @ groups)).unbind() for chosen in (half, ~half)), strict=True)
    squares = [(probes.apart(probes.bounds(one), probes.bounds(other)) / 2).square() for one, other in pairs]
    return torch.stack(squares).mean(0).sqrt()


def error_of_parts(method: Method, groups: Tensor, *, scale: float) -> float:
    """The largest standard error, as in `standard_errors`, estimated from the bounds of small parts of the sample."""
    probes = Probes(method, groups.sum(0) * scale)
    parts = groups.view(PARTS, GROUPS // PARTS, -1).sum(1) * (PARTS * scale)
    squares = [probes.apart(probes.first, probes.bounds(part)).square() for part in parts.unbind()]
    return float((torch.stack(squares).mean(0) / (PARTS - 1)).sqrt().max())


class Estimate(NamedTuple):
    """What a sample tells about its mini-batch.

    Args:
        statistics: estimated statistics of the whole mini-batch, (statistics_size,), float64.
        passed: the share of the mini-batch's sequences that are in the sample.
        error: the largest standard error of the bounds, relative to half their width.
        next_share: the result of the function of that name.
    """

    statistics: Tensor
    passed: float
    error: float
    next_share: float


def estimate(method: Method, groups: Tensor, *, sampled: float, sequences: float, precision: float) -> Estimate:
    """Estimates the mini-batch's statistics from those of a sample, and the error of the bounds.

    Args:
        groups: sums over the sample's sequences by group, over all ranks, (GROUPS, statistics_size), float64.
        sampled, sequences: the numbers of sequences in the sample and in the mini-batch, over all ranks.
        precision: the largest standard error that is wanted.
    """
    # The error is computed on the host, which is faster for thousands of operations on few numbers.
    on_host, scale = groups.cpu(), sequences / sampled
    error = float(standard_errors(method, on_host, scale=scale).max())
    largest = max(error, error_of_parts(method, on_host, scale=scale))
    return Estimate(
        groups.sum(0) * scale,
        sampled / sequences,
        without_end(error, sampled / sequences),
        next_share(largest, sampled=sampled, sequences=sequences, precision=precision),
    )


def without_end(error: float, share: float) -> float:
    """Corrects a standard error for the finite mini-batch: it is 0 if the sample contains all sequences.

    Args:
        error: standard error for an infinite population.
        share: the share of the mini-batch's sequences that are in the sample.
    """
    return error * math.sqrt(1 - share) if share < 1 else 0.0


def next_share(error: float, *, sampled: float, sequences: float, precision: float) -> float:
    """The share of the sequences that the next update at the same position takes.

    Args:
        error: the largest standard error of this update's bounds for an infinite population, from halves or parts.
        sampled, sequences: this update's numbers of sequences in the sample and in the mini-batch, over all ranks.
        precision: the largest standard error that is wanted.

    Returns:
        In (0, 1]; 1 if no smaller share suffices or the error is not finite. It is at least half of this update's
        share, because the error of bounds that move in steps may be 0 in one update and not in a smaller sample.
    """
    variance = MARGIN * sampled * error**2
    if not math.isfinite(variance):
        return 1.0
    wanted = variance / (sequences * precision**2 + variance)
    return max(wanted, sampled / sequences / 2)
