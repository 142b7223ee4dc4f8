"""A sample instead of the whole mini-batch: its sequences, the error of its bounds, and the size of the next sample.

The error comes from half-samples: the sample falls into groups at random, and the bounds of half of the groups are
compared with those of the other half. As many halves as there are groups less one, each pair of groups apart as often
as together, give for sums exactly the variance between groups (balanced half-samples, McCarthy 1969). A half moves the
bounds as far as the sample itself is off, so that the error also holds for bounds that move in steps, as BAPO's, which
leaving out one group would not move. The next sample is smaller than this one, and its bounds may take a step that
no half takes: so small parts say how many sequences it needs.
"""

import math
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.loss.bounds import Probes

# Where the worker keeps each sequence's group in verl's mini-batch, so that it is cut into micro-batches with it.
GROUP = "clipx_sampling_group"

# Groups into which a sample falls, a power of two: a standard error of 31 degrees of freedom is right to 13 %.
GROUPS = 32

# Sequences of the smallest sample, over all ranks: two a group.
LEAST = 2 * GROUPS

# Small parts of the sample: off by the square root of 15 times its own error.
PARTS = 16

# The next sample is planned for the upper end of the variance's one-sided 95 % interval: 31 over the 5 % quantile of
# chi-squared with 31 degrees of freedom.
MARGIN = 1.61


class Sample(NamedTuple):
    """The sequences of this rank's mini-batch that the extra pass takes.

    Args:
        rows: which, int64, (sampled,), ascending.
        group: of each of them, int64 in [0, GROUPS), (sampled,).
        sequences: number of this rank's sequences.
    """

    rows: Tensor
    group: Tensor
    sequences: int


def drawn(sequences: int, share: float, *, rank: int, ranks: int, seed: str) -> Sample:
    """A share of a rank's sequences at random: a larger one contains the smaller ones of the same seed.

    Args:
        sequences: number of this rank's sequences.
        share: in (0, 1]; every rank gives the same.
        rank, ranks: data-parallel.
        seed: every rank gives the same, each update another.
    """
    number = int.from_bytes(blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest(), "big") >> 1
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(number))
    sampled = min(sequences, max(math.ceil(share * sequences), math.ceil(LEAST / ranks)))
    # Counted through over the ranks, so that groups differ by one sequence at most.
    group = (torch.arange(sampled) * ranks + rank) % GROUPS
    rows, first = order[:sampled].sort()
    return Sample(rows, group[first], sequences)


def by_group(statistics: Tensor, group: Tensor) -> Tensor:
    """Sums over the sequences of each group, (GROUPS, statistics_size).

    Args:
        statistics: of each sequence, (sequences, statistics_size), float64.
        group: of each sequence, int64, (sequences,); outside [0, GROUPS) it is left out.
    """
    # Not index_add_: on a GPU its order, and so the last bit, is another one each time.
    member = group == torch.arange(GROUPS, device=group.device)[:, None]
    return member.to(statistics.dtype) @ statistics


def halves() -> Tensor:
    """Which groups are in each half, bool, (GROUPS - 1, GROUPS): the rows but the first of a Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUPS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix[1:] > 0


def standard_errors(method: Method, groups: Tensor, *, scale: float) -> Tensor:
    """Standard errors of the bounds that a sample leads to, of a population without end, over half their width.

    Args:
        method: decides on the bounds.
        groups: sums over the sample's sequences by group, (GROUPS, statistics_size), float64.
        scale: sequences of the mini-batch for each of the sample, by which sums are multiplied.

    Returns:
        Of the lower and the upper bound of every probe, (2, 2, PROBES).
    """
    probes, groups = Probes(method, groups.sum(0) * scale), groups * scale
    half = halves().to(groups.device)
    # Added up and not subtracted from the whole: what is 0 stays 0.
    pairs = zip(*((2 * (chosen.to(groups.dtype) @ groups)).unbind() for chosen in (half, ~half)), strict=True)
    squares = [(probes.apart(probes.bounds(one), probes.bounds(other)) / 2).square() for one, other in pairs]
    return torch.stack(squares).mean(0).sqrt()


def error_of_parts(method: Method, groups: Tensor, *, scale: float) -> float:
    """The largest standard error, as of `standard_errors`, by the bounds that small parts of the sample lead to."""
    probes = Probes(method, groups.sum(0) * scale)
    parts = groups.view(PARTS, GROUPS // PARTS, -1).sum(1) * (PARTS * scale)
    squares = [probes.apart(probes.first, probes.bounds(part)).square() for part in parts.unbind()]
    return float((torch.stack(squares).mean(0) / (PARTS - 1)).sqrt().max())


class Estimate(NamedTuple):
    """What follows from a sample for its mini-batch.

    Args:
        statistics: of the whole mini-batch, estimated, (statistics_size,), float64.
        passed: share of the mini-batch's sequences that the sample has.
        error: largest standard error of the bounds, over half their width.
        next_share: as the function of that name returns.
    """

    statistics: Tensor
    passed: float
    error: float
    next_share: float


def estimate(method: Method, groups: Tensor, *, sampled: float, sequences: float, precision: float) -> Estimate:
    """The mini-batch's statistics from those of a sample, with their error.

    Args:
        method: decides on the bounds.
        groups: sums over the sample's sequences by group, over all ranks, (GROUPS, statistics_size), float64.
        sampled, sequences: numbers of sequences in the sample and in the mini-batch, over all ranks.
        precision: largest standard error that is wanted.
    """
    # On the host, where some thousand operations on few numbers take less time.
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
    """The part of an error that the sequences outside the sample leave: 0 where there are none.

    Args:
        error: standard error of a population without end.
        share: of the mini-batch's sequences that the sample has.
    """
    return error * math.sqrt(1 - share) if share < 1 else 0.0


def next_share(error: float, *, sampled: float, sequences: float, precision: float) -> float:
    """The share of the sequences that the next update at the same position takes.

    Args:
        error: largest standard error of the last one's bounds, of a population without end, by halves or by parts.
        sampled, sequences: of the last one, over all ranks.
        precision: largest standard error that is wanted.

    Returns:
        In (0, 1]; 1 where nothing less suffices, or the error is not finite. At least half of the last one's share: the
        error of bounds that move in steps may be 0 in one update and not in the next, which has fewer sequences.
    """
    variance = MARGIN * sampled * error**2
    if not math.isfinite(variance):
        return 1.0
    wanted = variance / (sequences * precision**2 + variance)
    return max(wanted, sampled / sequences / 2)
