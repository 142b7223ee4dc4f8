"""Sums into buckets, in float64 and without waiting for the accelerator."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bucket_sums(bucket: Tensor, values: Sequence[Tensor], bucket_count: int) -> Tensor:
    """The sum of each value over the tokens of each bucket.

    Sums each sequence on its own first: tokens of different sequences then don't contend for the same few addresses.

    Args:
        bucket: bucket of each token, int64 in [0, bucket_count), (sequences, length).
        values: tensors of (sequences, length); 0 where a token must not count.
        bucket_count: number of buckets.

    Returns:
        (len(values), bucket_count), float64.
    """
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=torch.float64, device=bucket.device)
    return torch.stack([zeros.scatter_add(1, bucket, value.to(torch.float64)).sum(0) for value in values])
