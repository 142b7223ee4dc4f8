"""Additive histograms and their quantiles, without waiting for the accelerator."""

import torch
from torch import Tensor, where


def bucket_of(values: Tensor, inner_edges: Tensor) -> Tensor:
    """The bucket of each value. A bucket contains its upper edge; the first and the last bucket are open.

    Args:
        values: (sequences, length), any float dtype.
        inner_edges: ascending, (buckets - 1,), float64.

    Returns:
        int64 in [0, buckets), (sequences, length). NaN, which padding may contain, gets a valid bucket too.
    """
    return torch.bucketize(values.detach().to(torch.float64), inner_edges)


def whole_sums(bucket: Tensor, values: Tensor, bucket_count: int) -> Tensor:
    """The sums of each sequence's values by bucket. The values are whole numbers, so the sums are exact in any order.

    Each sequence is summed separately first. Most tokens fall into a few buckets, and in this way those of different
    sequences do not compete for the same addresses.

    Args:
        bucket: int32 or int64 in [0, bucket_count), (sequences, length).
        values: whole numbers of any dtype, or bool, (sequences, length); the sums must be below 2^53.

    Returns:
        (sequences, bucket_count), float64.
    """
    # A CPU adds integers twice as fast. For an accelerator, the compiler has no atomic addition of 64-bit integers.
    dtype = torch.int64 if values.device.type == "cpu" else torch.float64
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=dtype, device=values.device)
    return zeros.scatter_add(1, bucket.to(torch.int64), values.to(dtype)).to(torch.float64)


def ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is not above 0."""
    return where(denominator > 0, numerator / where(denominator > 0, denominator, 1.0), 0.0)


def first_reaching(counts: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The first bucket at which the cumulative count reaches a share of the total.

    Args:
        counts: (buckets,), float64, at least 0.
        share: in (0, 1].

    Returns:
        The index of the bucket, 0-d int64, which is 0 if all counts are 0; and the count up to and including that
        bucket, 0-d float64.
    """
    cumulative = counts.cumsum(0)
    index = (cumulative < share * cumulative[-1]).sum()
    # Not cumulative[index], which would copy the index to the host.
    return index, cumulative.gather(0, index.reshape(1)).squeeze(0)
