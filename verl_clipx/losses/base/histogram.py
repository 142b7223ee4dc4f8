"""Counts and sums tokens by bucket, and finds quantiles of these histograms, without waiting for the accelerator.

Histograms are additive over any split of the tokens. A quantile is known to the width of a bucket:
`find_bucket_reaching` returns the bucket that contains it.
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
    """Return the sums of each sequence's values by bucket. They are exact, because the values are whole numbers.

    Each sequence is summed separately. Most tokens fall into a few buckets, and in this way those of different
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
    """Return numerator / denominator, and 0 where the denominator is not above 0."""
    is_positive = denominator > 0
    # Divided by 1 elsewhere, so that no NaN comes up, which `where` would let into a gradient.
    divisor = where(is_positive, denominator, 1.0)
    return where(is_positive, numerator / divisor, 0.0)


class ReachedBucket(NamedTuple):
    """The bucket at which a cumulative count reaches a share of the total.

    Attributes:
        index: the number of the bucket, from 0 on, 0-d int64. If all counts are 0, it is the bucket at which the
            counting began.
        count: the number of tokens up to and including that bucket, 0-d float64.
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
    # Cumulative counts never fall, so the buckets that do not reach the share are those before the wanted one.
    is_before = cumulative < share * cumulative[-1]
    index = is_before.sum()
    # Not cumulative[index], which would copy the index to the host.
    count = cumulative.gather(0, index.reshape(1)).squeeze(0)
    return ReachedBucket(index=index, count=count)


# How many buckets an octave has, which is a doubling of the distance. The upper edge of a bucket is at most 1.6 % above
# its lower one, and float32 holds every edge exactly.
PER_OCTAVE = 64

# How many units 1 has. A square is rounded to a whole number of units. Sums of whole numbers don't depend on their
# order as long as float64 holds them exactly, which is up to 2^53 units: the squares of 2^23 distances of 8, or of 2^17
# distances of LARGEST.
UNITS_IN_ONE = 2.0**24

# A distance beyond this one is added with the square of this one.
LARGEST = 64.0


class Octaves(NamedTuple):
    """Buckets of a distance of at least 0: PER_OCTAVE equally wide ones in each octave, and an outer one at each end.

    Args:
        lowest: the first bucket goes from 0 to 2^lowest.
        count: the number of octaves between the outer buckets. The last bucket begins at 2^(lowest + count) and has no
            end.
    """

    lowest: int
    count: int

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return PER_OCTAVE * self.count + 2

    def edges(self, device: torch.device | str) -> Tensor:
        """Return the upper edges of all buckets but the last, which has none: ascending, (buckets - 1,), float64."""
        # Made on the device: copying a list to an accelerator would wait for it.
        number = torch.arange(self.buckets - 1, dtype=float64, device=device)
        octave = (number / PER_OCTAVE).floor()
        fraction_of_octave = number / PER_OCTAVE - octave
        return (1 + fraction_of_octave) * (octave + self.lowest).exp2()

    def bucket_of(self, x: Tensor) -> Tensor:
        """Return the bucket of each |x|: int32 in [0, buckets), of x's shape. A bucket contains its upper edge."""
        # A float32 has 8 bits of exponent and 23 bits of fraction. The exponent and the first six bits of the fraction,
        # without the other 17, number the buckets: 64 to an octave. torch.bucketize, which would search for them, takes
        # ten times as long on a CPU. 1 is subtracted so that an edge belongs to the bucket below it.
        bits = x.abs().to(torch.float32).view(torch.int32) - 1
        # In this numbering, the number of the distances just below 2^lowest, which belong to the first bucket. An
        # exponent is stored with 127 added.
        first = (127 + self.lowest) * PER_OCTAVE - 1
        return ((bits >> 17) - first).clamp(0, self.buckets - 1)

    def counts_and_squares(self, x: Tensor, is_counted: Tensor) -> Tensor:
        """Count the tokens in each bucket of |x|, and sum their squares.

        Args:
            x: distances of either sign, float32 or float64, (sequences, length). Where a token does not count, it may
                be any number, but not NaN.
            is_counted: the tokens that count, bool, (sequences, length).

        Returns:
            (2 * buckets,), float64, additive and exact in any order: the counts, then the sums of x^2. A token farther
            than LARGEST counts in its own bucket, with the square of LARGEST.
        """
        # In one expression, so that its intermediate tensors are freed at once.
        squares_in_units = (where(is_counted, x, 0.0).clamp(-LARGEST, LARGEST).square() * UNITS_IN_ONE).round()
        # All tokens are summed as one sequence, because the sums of each sequence would take more memory than the
        # tokens.
        bucket = self.bucket_of(x).to(int64).view(1, -1)
        counts = whole_sums(bucket, is_counted.view(1, -1), self.buckets)
        sums_in_units = whole_sums(bucket, squares_in_units.view(1, -1), self.buckets)
        return cat([counts, sums_in_units / UNITS_IN_ONE], 1).squeeze(0)
