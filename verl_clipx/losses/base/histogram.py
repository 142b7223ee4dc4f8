"""Additive histograms, their quantiles and sums of squares by bucket, without waiting for the accelerator."""

from typing import NamedTuple

import torch
from torch import Tensor, cat, float64, int64, where


def bucket_of(values: Tensor, inner_edges: Tensor) -> Tensor:
    """The bucket of each value. A bucket contains its upper edge; the first and the last bucket are open.

    Args:
        values: (sequences, length), any float dtype.
        inner_edges: ascending, (buckets - 1,), float64.

    Returns:
        int64 in [0, buckets), (sequences, length). NaN, which padding may contain, gets a valid bucket too.
    """
    return torch.bucketize(values.detach().to(float64), inner_edges)


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
    dtype = int64 if values.device.type == "cpu" else float64
    zeros = torch.zeros(bucket.shape[0], bucket_count, dtype=dtype, device=values.device)
    return zeros.scatter_add(1, bucket.to(int64), values.to(dtype)).to(float64)


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


# A bucket is at most 1.6 % wide, and float32 holds every edge exactly.
PER_OCTAVE = 64

# Squares are added in whole numbers of a unit of 2^-24: sums of whole numbers don't depend on their order, and those of
# a bucket fit into the 53 bits of a float64: of 2^23 tokens with a distance of 8, of 2^17 with LARGEST.
UNITS_IN_ONE = 2.0**24

# Squares of larger distances are taken to be its square.
LARGEST = 64.0


class Octaves(NamedTuple):
    """The buckets of a distance from 0 on.

    Args:
        lowest: the first bucket ends at 2^lowest.
        count: the number of octaves from there to the last edge; the last bucket has no end.
    """

    lowest: int
    count: int

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return PER_OCTAVE * self.count + 2

    def edges(self, device: torch.device | str) -> Tensor:
        """The upper edges of all buckets but the last, which has none: (buckets - 1,), float64."""
        # Made on the device: copying a list to an accelerator would wait for it.
        step = torch.arange(self.buckets - 1, dtype=float64, device=device)
        octave = (step / PER_OCTAVE).floor()
        return (1 + step / PER_OCTAVE - octave) * (octave + self.lowest).exp2()

    def bucket_of(self, x: Tensor) -> Tensor:
        """The bucket of each |x|, which contains its upper edge: int32 in [0, buckets)."""
        # A float32's exponent and the first six bits of its fraction number the buckets; torch.bucketize, which would
        # search for them, takes ten times as long on a CPU. One less, so that an edge belongs to the bucket below it.
        bits = x.abs().to(torch.float32).view(torch.int32) - 1
        first = (127 + self.lowest) * PER_OCTAVE - 1
        return ((bits >> 17) - first).clamp(0, self.buckets - 1)

    def counts_and_squares(self, x: Tensor, counted: Tensor) -> Tensor:
        """Returns, for each bucket of |x|, the number of tokens that count, and the sum of their squares.

        Args:
            x: float32 or float64, (sequences, length); what does not count may be any number but NaN.
            counted: bool, (sequences, length).

        Returns:
            (2 * buckets,), float64, additive and exact in any order: the counts, then the sums of squares. A token
            farther than LARGEST counts in its own bucket, with the square of LARGEST.
        """
        # In one expression, so that no step of it outlives its use.
        squares_in_units = (where(counted, x, 0.0).clamp(-LARGEST, LARGEST).square() * UNITS_IN_ONE).round()
        # All tokens as one sequence: sums of each sequence would take more memory than the tokens.
        bucket = self.bucket_of(x).to(int64).view(1, -1)
        counts = whole_sums(bucket, counted.view(1, -1), self.buckets)
        sums_in_units = whole_sums(bucket, squares_in_units.view(1, -1), self.buckets)
        return cat([counts, sums_in_units / UNITS_IN_ONE], 1).squeeze(0)
