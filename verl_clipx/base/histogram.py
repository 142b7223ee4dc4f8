"""Additive histograms and their quantiles, without waiting for the accelerator."""

from collections.abc import Sequence

import torch
from torch import Tensor, where

# Most tokens have a few of the indices of a sum, and neighbours would wait for each other at the same address.
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
        terms: pairs of an index, int64 in [0, slots * classes), and values, both (sequences, length). The values of an
            index are whole numbers of one unit, and their sum is below 2^53 of it. No index is in two terms' ranges.
        slots: number of sums.
        classes: of values with units of their own in each slot: the index is slot * classes + class.

    Returns:
        (slots,), float64.
    """
    size = slots * classes * COPIES
    found = torch.zeros(size, dtype=torch.float64, device=terms[0][0].device)
    for index, values in terms:
        copy = torch.arange(index.shape[-1], device=index.device) % COPIES
        place = (index * COPIES + copy).flatten()
        zeros = torch.zeros(size, dtype=torch.float64, device=index.device)
        found = found + zeros.scatter_add(0, place, values.to(torch.float64).flatten())
    return found.view(slots, -1).sum(-1)


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
