"""Additive histograms and their quantiles, without waiting for the accelerator."""

from collections.abc import Sequence

import torch
from torch import Tensor, where

# Of each sum on an accelerator: most tokens belong to a few sums, and neighbours would wait for each other.
COPIES = 8


def bucket_of(values: Tensor, inner_edges: Tensor) -> Tensor:
    """The bucket of each value; each bucket contains its upper edge, the first and the last one are open.

    Args:
        values: (sequences, length), any float dtype.
        inner_edges: ascending, (buckets - 1,), float64.

    Returns:
        int64 in [0, buckets), (sequences, length); NaN, which padding may hold, gets a valid bucket like any number.
    """
    return torch.bucketize(values.detach().to(torch.float64), inner_edges)


def histogram(bucket: Tensor, mask: Tensor, bucket_count: int) -> Tensor:
    """How many tokens each bucket holds.

    Counts each sequence on its own first: most tokens fall into a few buckets, and then those of different sequences
    don't contend for the same addresses.

    Args:
        bucket: int64 in [0, bucket_count), (sequences, length).
        mask: bool or 0/1, (sequences, length).
        bucket_count: number of buckets.

    Returns:
        (bucket_count,), float64, whole numbers: their sums are exact in any order.
    """
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=torch.float64, device=bucket.device)
    return zeros.scatter_add(1, bucket, mask.bool().to(torch.float64)).sum(0)


def exact_sums(terms: Sequence[tuple[Tensor, Tensor]], slots: int, classes: int = 1) -> Tensor:
    """Sums of values by slot, the same to the last bit in any order.

    In float64, since a compiler has no code of its own that adds 64-bit integers atomically.

    Args:
        terms: pairs of an index, int32 in [0, slots * classes), and values, both (sequences, length). The values of an
            index are whole numbers of one unit, and their sum is below 2^53 of it. No index is in two terms' ranges.
        slots: number of sums.
        classes: of values with units of their own in each slot: the index is slot * classes + class.

    Returns:
        (slots,), float64.
    """
    device, length = terms[0][0].device, terms[0][0].shape[-1]
    copies = 1 if device.type == "cpu" else COPIES
    size, column = slots * classes * copies, torch.arange(length, dtype=torch.int32, device=device)
    found = []
    for index, values in terms:
        if copies > 1:
            # A 0 may be added anywhere, and padding is full of them.
            index = where(values != 0, index * copies + column % copies, column % size)
        zeros = torch.zeros(size, dtype=torch.float64, device=device)
        found.append(zeros.scatter_add(0, index.flatten().to(torch.int64), values.flatten().to(torch.float64)))
    return sum(found[1:], found[0]).view(slots, -1).sum(-1)


def ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their ratio; 0 where the denominator is not above 0."""
    return where(denominator > 0, numerator / where(denominator > 0, denominator, 1.0), 0.0)


def first_reaching(counts: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The first bucket at which the cumulative count reaches a share of the total.

    Args:
        counts: (buckets,), float64, at least 0.
        share: in (0, 1].

    Returns:
        index: 0-d int64; 0 if all counts are 0.
        reached: 0-d float64, the count up to and including that bucket.
    """
    cumulative = counts.cumsum(0)
    index = (cumulative < share * cumulative[-1]).sum()
    # Not cumulative[index]: that would fetch the index to the host.
    return index, cumulative.gather(0, index.reshape(1)).squeeze(0)
