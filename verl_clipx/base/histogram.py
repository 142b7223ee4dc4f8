"""Additive histograms and their quantiles, without waiting for the accelerator."""

import torch
from torch import Tensor, where


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

    Returns:
        (bucket_count,), float64, whole numbers: their sums are exact in any order.
    """
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=torch.float64, device=bucket.device)
    return zeros.scatter_add(1, bucket, mask.bool().to(torch.float64)).sum(0)


def whole_sums(bucket: Tensor, values: Tensor, bucket_count: int) -> Tensor:
    """The sums of each sequence's values by bucket. The values are whole numbers: their sums are exact in any order.

    Args:
        bucket: int32 or int64 in [0, bucket_count), (sequences, length).
        values: (sequences, length), whole numbers of any dtype, or bool, whose sums are below 2^53.

    Returns:
        (sequences, bucket_count), float64.
    """
    # A CPU adds integers in half the time; for an accelerator the compiler has no atomic addition of 64-bit integers.
    dtype = torch.int64 if values.device.type == "cpu" else torch.float64
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=dtype, device=values.device)
    return zeros.scatter_add(1, bucket.to(torch.int64), values.to(dtype)).to(torch.float64)


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
