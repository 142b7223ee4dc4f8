"""Buckets of a distance, a fixed number to an octave: how many tokens are in each, and how large their squares are."""

from typing import NamedTuple

import torch
from torch import Tensor, cat, float64, int64, where

from verl_clipx.base.histogram import whole_sums

# A bucket is at most 1.6 % wide, and float32 holds every edge exactly.
PER_OCTAVE = 64

# Squares are added in whole numbers of 2^-24: sums of whole numbers don't depend on their order, and those of a bucket
# fit into the 53 bits of a float64: of 2^23 tokens with a distance of 8, of 2^17 with LARGEST.
UNITS = 2.0**24

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

    def sums(self, x: Tensor, counted: Tensor) -> Tensor:
        """For each bucket of |x|: the number of tokens that count, and the sum of their squares.

        Args:
            x: float32 or float64, (sequences, length); what does not count may be any number but NaN.
            counted: bool, (sequences, length).

        Returns:
            (2 * buckets,), float64, additive and exact in any order: the numbers before the sums.
        """
        squares = (where(counted, x, 0.0).clamp(-LARGEST, LARGEST).square() * UNITS).round()
        bucket = self.bucket_of(x).to(int64)
        # As one sequence: the sums of each would take more memory than the tokens.
        numbers, sums = (
            whole_sums(bucket.view(1, -1), values.view(1, -1), self.buckets) for values in (counted, squares)
        )
        return cat([numbers, sums / UNITS], 1).squeeze(0)
