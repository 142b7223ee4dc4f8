"""Entropy selection by hand, per sequence, and its buckets over a mini-batch. Not covered:
ACPO's releases (tests/training/worker/test_golden.py), the loss of the selected tokens, how a worker sums the
histogram.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_clipx.losses.modifiers.entropy_selection import (
    ENTROPY_BUCKETS,
    HIGHEST_EDGE,
    LOWEST_EDGE,
    EntropySelection,
    entropy_statistics,
)

KEEPS = st.sampled_from(["highest", "lowest"])
FRACTIONS = st.one_of(st.sampled_from([0.2, 0.8, 1.0, 0.3, 1e-6]), st.floats(0.001, 1.0))
ENTROPIES = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 1.5]), st.floats(0.0, 12.0))
TOKENS = st.lists(st.tuples(ENTROPIES, st.booleans()), min_size=1, max_size=36)
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
MASKS = [torch.bool, torch.int64, torch.float32]

# 5 tokens of which the third is padding.
ENTROPY = [0.5, 2.0, math.nan, 0.5, 0.1]
MASK = [1, 1, 0, 1, 1]


def selection(keep, ratio=0.5, over="sequence"):
    return EntropySelection(keep=keep, ratio=ratio, over=over)


@pytest.mark.parametrize(("dtype", "mask_dtype"), list(zip(DTYPES, MASKS, strict=True)))
@pytest.mark.parametrize(
    ("keep", "fraction", "expected"),
    [
        ("highest", 0.5, [1, 1, 0, 0, 0]),  # 2 of 4; the first and the fourth are equal, the first is taken
        *(("highest", 0.01, [0, 1, 0, 0, 0]), ("highest", 0.75, [1, 1, 0, 1, 0]), ("highest", 1.0, [1, 1, 0, 1, 1])),
        *(("lowest", 0.01, [0, 0, 0, 0, 1]), ("lowest", 0.5, [1, 0, 0, 0, 1]), ("lowest", 0.75, [1, 0, 0, 1, 1])),
        ("lowest", 0.99, [1, 0, 0, 1, 1]),  # the whole part of 3.96
    ],
)
def test_selection_per_sequence_by_hand(keep, fraction, expected, dtype, mask_dtype):
    # Beside it a sequence of one token and one without any.
    entropy = torch.tensor([ENTROPY, [math.nan] * 4 + [7.0], [math.nan] * 5], dtype=dtype)
    mask = torch.tensor([MASK, [0, 0, 0, 0, 1], [0] * 5]).to(mask_dtype)
    actual = selection(keep, fraction).selected(entropy, mask)
    assert actual.dtype == torch.bool and not entropy_statistics(entropy.requires_grad_(), mask).requires_grad
    assert actual.int().tolist() == [expected, [0, 0, 0, 0, 1], [0] * 5]


def test_counts_are_the_whole_part_of_pythons_product():
    # 0.29 * 100 is 28.999999999999996 in Python, and so 28; in float32 it would be 29.
    assert selection("highest", 0.29).kept_counts(torch.ones(1, 100)).tolist() == [int(100 * 0.29)] == [28]


@given(tokens=TOKENS, keep=KEEPS, fraction=FRACTIONS)
@settings(deadline=None)
def test_the_fewest_whole_buckets_that_reach_the_fraction_are_selected(tokens, keep, fraction):
    values, mask = (torch.tensor([row]) for row in zip(*tokens, strict=True))
    values = values.double().masked_fill(~mask, torch.nan)
    statistics = entropy_statistics(values, mask)
    bucket, selected = selection(keep, fraction).find_last_kept_bucket(statistics)
    chosen = selection(keep, over="mini_batch").selected(values, mask, bucket)
    total = int(mask.sum())
    wanted = Fraction(fraction * total)
    assert chosen.sum() == selected
    assert not (chosen & ~mask).any()
    assert int(selected) >= wanted
    if total == 0:
        return
    # One bucket less would be too few, and none was passed over: every selected entropy is beyond every other one.
    assert int(selected) - int(statistics[bucket]) < wanted
    taken, left = values[chosen], values[mask & ~chosen]
    if len(left):
        assert taken.min() > left.max() if keep == "highest" else taken.max() < left.min()


@given(place=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(place):
    width = math.log(HIGHEST_EDGE / LOWEST_EDGE) / (ENTROPY_BUCKETS - 2)
    at = math.log(1e-5) + place * (math.log(19) - math.log(1e-5))
    # A little more than a bucket apart are at least one bucket apart, a little less at most one.
    entropies = torch.tensor([at, at + 1.005 * width, at + 0.995 * width], dtype=torch.float64).exp()
    first, wider, narrower = (int(entropy_statistics(of.view(1, 1), torch.ones(1, 1)).argmax()) for of in entropies)
    assert wider - first in (1, 2) and narrower - first in (0, 1)
