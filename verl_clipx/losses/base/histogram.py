"""Additive histograms, their quantiles and sums of squares by bucket, without waiting for the accelerator.

A quantile is known to the width of a bucket: `find_bucket_reaching` returns the bucket that contains it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, cat, float64, int64, where


def bucket_of(values: Tensor, inner_edges: Tensor) -> Tensor:
    """Return the bucket of each value. A bucket contains its upper edge.

    The first bucket has no lower edge, and the last one has no upper edge.

    Args:
        values: (sequences, length), any float dtype.
        inner_edges: ascending, (buckets - 1,), float64.

    Returns:
        int64 in [0, buckets), (sequences, length). NaN, which the entropies of padding may be, has a valid bucket
        too.
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
    # Divided by 1 there, so that no NaN comes up, which `where` would let into a gradient.
    divisor = where(denominator > 0, denominator, 1.0)
    return where(denominator > 0, numerator / divisor, 0.0)


class ReachedBucket(NamedTuple):
    """The bucket at which a cumulative count reaches a share of the total.

    Attributes:
        index: of the bucket, 0-d int64; 0 if all counts are 0.
        count: the tokens up to and including that bucket, 0-d float64.
    """

    index: Tensor
    count: Tensor


def find_bucket_reaching(share: float, counts: Tensor) -> ReachedBucket:
    """Find the first bucket at which the cumulative count reaches a share of the total.

    Args:
        share: in (0, 1].
        counts: the tokens in each bucket, (buckets,), float64.
    """
    cumulative = counts.cumsum(0)
    # Cumulative counts never fall, so that the buckets that do not reach the share are those before the wanted one.
    is_before = cumulative < share * cumulative[-1]
    index = is_before.sum()
    # Not cumulative[index], which would copy the index to the host.
    count = cumulative.gather(0, index.reshape(1)).squeeze(0)
    return ReachedBucket(index, count)


# Buckets of one octave, which is a doubling of the distance. The upper edge of a bucket is at most 1.6 % above its
# lower one, and float32 holds every edge exactly.
PER_OCTAVE = 64

# A square is rounded to a whole number of units of 2^-24. Sums of whole numbers don't depend on their order as long as
# they stay below 2^53, which float64 holds: the sum of 2^23 squares of a distance of 8 does, or of 2^17 of LARGEST.
UNITS_IN_ONE = 2.0**24

# A larger distance is added with the square of this one.
LARGEST = 64.0


class Octaves(NamedTuple):
    """Buckets of a distance of at least 0: PER_OCTAVE equally wide ones in each octave, and an outer one at each end.

    Args:
        lowest: the first bucket goes from 0 to 2^lowest.
        count: the octaves between the outer buckets; the last bucket begins at 2^(lowest + count) and has no end.
    """

    lowest: int
    count: int

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return PER_OCTAVE * self.count + 2

    def edges(self, device: torch.device | str) -> Tensor:
        """The upper edges of all buckets but the last, which has none: ascending, (buckets - 1,), float64."""
        # Made on the device: copying a list to an accelerator would wait for it.
        edge = torch.arange(self.buckets - 1, dtype=float64, device=device)
        octave = (edge / PER_OCTAVE).floor()
        fraction_of_octave = edge / PER_OCTAVE - octave
        return (1 + fraction_of_octave) * (octave + self.lowest).exp2()

    def bucket_of(self, x: Tensor) -> Tensor:
        """The bucket of each |x|, which contains its upper edge: int32 in [0, buckets)."""
        # A float32 is 8 bits of exponent and 23 bits of fraction. The exponent and the first six bits of the fraction,
        # without the other 17, number the buckets: 64 to an octave. torch.bucketize, which would search for them, takes
        # ten times as long on a CPU. One less, so that an edge belongs to the bucket below it.
        bits = x.abs().to(torch.float32).view(torch.int32) - 1
        # An exponent is stored with 127 added; minus one for the first bucket, which lies below 2^lowest.
        first = (127 + self.lowest) * PER_OCTAVE - 1
        return ((bits >> 17) - first).clamp(0, self.buckets - 1)

    def counts_and_squares(self, x: Tensor, is_counted: Tensor) -> Tensor:
        """Count the tokens in each bucket of |x|, and sum their squares.

        Args:
            x: distances of either sign, float32 or float64, (sequences, length); what is not counted may be any number
                but NaN.
            is_counted: the tokens that count, bool, (sequences, length).

        Returns:
            (2 * buckets,), float64, additive and exact in any order: the counts, then the sums of x^2. A token farther
            than LARGEST counts in its own bucket, with the square of LARGEST.
        """
        # In one expression, so that its intermediate tensors are freed at once.
        squares_in_units = (where(is_counted, x, 0.0).clamp(-LARGEST, LARGEST).square() * UNITS_IN_ONE).round()
        # All tokens as one sequence: sums of each sequence would take more memory than the tokens.
        bucket = self.bucket_of(x).to(int64).view(1, -1)
        counts = whole_sums(bucket, is_counted.view(1, -1), self.buckets)
        sums_in_units = whole_sums(bucket, squares_in_units.view(1, -1), self.buckets)
        return cat([counts, sums_in_units / UNITS_IN_ONE], 1).squeeze(0)
