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


def count_below(candidates: Tensor, values: Tensor, *, start: float, step: float) -> Tensor:
    """How many candidates lie below each value: torch.bucketize, which takes ten times as long on a CPU.

    The arithmetic of the regular grid gives the number to within one, two comparisons with the candidates themselves
    the rest. A grid too fine for that in the candidates' precision is left to torch.bucketize.

    Args:
        candidates: ascending, each less than one step from the point of the same number of the regular grid.
        values: finite, (sequences, length), in the candidates' dtype.
        start: first point of the grid.
        step: distance of its points; 0 for one candidate.

    Returns:
        int32 in [0, len(candidates)], (sequences, length).
    """
    if step < 16 * torch.finfo(values.dtype).eps * (abs(start) + step * len(candidates)):
        return torch.bucketize(values, candidates, out_int32=True)
    guess = ((values - start) / step).ceil_().clamp_(0, len(candidates)).to(torch.int32).flatten()
    ends = torch.full_like(candidates[:1], torch.inf)
    edges = torch.cat([-ends, candidates, ends])
    too_high = (values.flatten() <= edges.index_select(0, guess)).view(torch.int8)
    too_low = (values.flatten() > edges.index_select(0, guess + 1)).view(torch.int8)
    return guess.sub_(too_high).add_(too_low).view_as(values)
