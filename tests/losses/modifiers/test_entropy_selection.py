"""Entropy selection by hand, per sequence, and its buckets over a mini-batch. Not covered: ACPO's releases
(tests/training/worker/test_golden.py), the loss of the selected tokens, how a worker sums the histogram.
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
# Each an entropy, and whether the token is in the mask.
TOKENS = st.lists(st.tuples(ENTROPIES, st.booleans()), min_size=1, max_size=36)


def make_selection(keep, ratio=0.5, over="sequence"):
    return EntropySelection(keep=keep, ratio=ratio, over=over)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(torch.bfloat16, torch.bool), (torch.float32, torch.int64), (torch.float64, torch.float32)],
)
@pytest.mark.parametrize(
    ("keep", "fraction", "expected"),
    [
        ("highest", 0.01, [0, 1, 0, 0, 0]),
        # 2 of 4: the first and the fourth are equal, and the first is taken.
        ("highest", 0.5, [1, 1, 0, 0, 0]),
        ("highest", 0.75, [1, 1, 0, 1, 0]),
        ("highest", 1.0, [1, 1, 0, 1, 1]),
        ("lowest", 0.01, [0, 0, 0, 0, 1]),
        ("lowest", 0.5, [1, 0, 0, 0, 1]),
        ("lowest", 0.75, [1, 0, 0, 1, 1]),
        # The whole part of 3.96.
        ("lowest", 0.99, [1, 0, 0, 1, 1]),
    ],
)
def test_selection_per_sequence_by_hand(keep, fraction, expected, dtype, mask_dtype):
    # Beside a sequence with padding, one of one token and one without any.
    entropy = torch.tensor(
        [
            [0.5, 2.0, math.nan, 0.5, 0.1],
            [math.nan, math.nan, math.nan, math.nan, 7.0],
            [math.nan, math.nan, math.nan, math.nan, math.nan],
        ],
        dtype=dtype,
    )
    mask = torch.tensor(
        [
            [1, 1, 0, 1, 1],
            [0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0],
        ]
    ).to(mask_dtype)
    selected = make_selection(keep, fraction).selected(entropy, mask)
    assert selected.dtype == torch.bool
    assert selected.int().tolist() == [expected, [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert not entropy_statistics(entropy.requires_grad_(), mask).requires_grad


def test_counts_are_the_whole_part_of_pythons_product():
    # 0.29 * 100 is 28.999999999999996 in Python, and so 28; in float32 it would be 29.
    assert make_selection("highest", 0.29).kept_counts(torch.ones(1, 100)).tolist() == [int(100 * 0.29)] == [28]


@given(tokens=TOKENS, keep=KEEPS, fraction=FRACTIONS)
@settings(deadline=None)
def test_the_fewest_whole_buckets_that_reach_the_fraction_are_selected(tokens, keep, fraction):
    values, mask = (torch.tensor([row]) for row in zip(*tokens, strict=True))
    values = values.double().masked_fill(~mask, torch.nan)
    statistics = entropy_statistics(values, mask)
    bucket, count = make_selection(keep, fraction).find_last_kept_bucket(statistics)
    selected = make_selection(keep, over="mini_batch").selected(values, mask, bucket)
    tokens_in_mask = int(mask.sum())
    at_least = Fraction(fraction * tokens_in_mask)
    assert selected.sum() == count
    assert not (selected & ~mask).any()
    assert int(count) >= at_least
    if tokens_in_mask == 0:
        return
    # One bucket less would be too few, and none was passed over: every selected entropy is beyond every other one.
    assert int(count) - int(statistics[bucket]) < at_least
    inside = values[selected]
    outside = values[mask & ~selected]
    if len(outside) and keep == "highest":
        assert inside.min() > outside.max()
    if len(outside) and keep == "lowest":
        assert inside.max() < outside.min()


@given(place=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(place):
    width = math.log(HIGHEST_EDGE / LOWEST_EDGE) / (ENTROPY_BUCKETS - 2)
    log_entropy = math.log(1e-5) + place * (math.log(19) - math.log(1e-5))
    bucket = bucket_of_entropy(log_entropy)
    # A little more than a width apart are at least one bucket apart, a little less at most one.
    assert bucket_of_entropy(log_entropy + 1.005 * width) - bucket in (1, 2)
    assert bucket_of_entropy(log_entropy + 0.995 * width) - bucket in (0, 1)


def bucket_of_entropy(log_entropy):
    entropy = torch.tensor([[log_entropy]], dtype=torch.float64).exp()
    return int(entropy_statistics(entropy, torch.ones(1, 1)).argmax())
