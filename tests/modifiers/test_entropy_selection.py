"""Entropy selection by hand and against a plain Python selection, per sequence and over a mini-batch. Not covered:
ACPO's releases (tests/worker/test_golden.py), the loss of the selected tokens, how a worker sums the histogram.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from tests.modifiers.layouts import layouts
from verl_clipx.modifiers.entropy_selection import (
    ENTROPY_BUCKETS,
    HIGHEST_EDGE,
    LOWEST_EDGE,
    EntropySelection,
    entropy_statistics,
)

KEEPS = st.sampled_from(["highest", "lowest"])
FRACTIONS = st.one_of(st.sampled_from([0.2, 0.8, 1.0, 0.3, 1e-6]), st.floats(0.001, 1.0))
ENTROPIES = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 1.5]), st.floats(0.0, 12.0))
LAYOUTS = layouts(ENTROPIES)
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


def _selected_in_python(row, mask_row, keep, fraction):
    """Positions by sorted(), which keeps the order of equal elements."""
    tokens = [position for position, inside in enumerate(mask_row) if inside]
    count = max(1, int(len(tokens) * fraction)) if tokens else 0
    sign = -1 if keep == "highest" else 1
    return set(sorted(tokens, key=lambda position: sign * row[position])[:count])


@given(layout=LAYOUTS, keep=KEEPS, fraction=FRACTIONS)
@settings(deadline=None)
def test_selection_per_sequence_is_pythons(layout, keep, fraction):
    actual = selection(keep, fraction).selected(*layout)
    for row, mask_row, selected in zip(layout.values.tolist(), layout.mask.tolist(), actual, strict=True):
        assert set(selected.nonzero().flatten().tolist()) == _selected_in_python(row, mask_row, keep, fraction)
    assert (selection("highest", fraction).counts(layout.mask) == actual.sum(1)).all()


def test_counts_are_the_whole_part_of_pythons_product():
    # 0.29 * 100 is 28.999999999999996 in Python, and so 28; in float32 it would be 29.
    assert selection("highest", 0.29).counts(torch.ones(1, 100)).tolist() == [int(100 * 0.29)] == [28]


@given(layout=LAYOUTS, keep=KEEPS, fraction=FRACTIONS)
@settings(deadline=None)
def test_the_fewest_whole_buckets_that_reach_the_fraction_are_selected(layout, keep, fraction):
    statistics = entropy_statistics(*layout)
    bucket, selected = selection(keep, fraction).threshold(statistics)
    chosen = selection(keep, over="mini_batch").selected(*layout, bucket)
    total = int(layout.mask.sum())
    wanted = Fraction(fraction * total)
    assert chosen.sum() == selected
    assert not (chosen & ~layout.mask).any()
    assert int(selected) >= wanted
    if total == 0:
        return
    # One bucket less would be too few, and none was passed over: every selected entropy is beyond every other one.
    assert int(selected) - int(statistics[bucket]) < wanted
    taken, left = layout.values[chosen], layout.values[layout.mask & ~chosen]
    if len(left):
        assert taken.min() > left.max() if keep == "highest" else taken.max() < left.min()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_outside_the_buckets_fall_into_the_open_ones(dtype):
    # Rounding can make an entropy negative; nothing real is above 20 nats.
    entropy = torch.tensor([[-1e-3, 0.0, LOWEST_EDGE / 2, 2 * HIGHEST_EDGE, math.inf]], dtype=dtype)
    counts = entropy_statistics(entropy, torch.ones(1, 5))
    assert counts[0] == 3
    assert counts[-1] == 2


@given(layout=LAYOUTS, left=st.integers(0, 4), right=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_histograms_add_up_and_neither_padding_nor_order_changes_them(layout, left, right, data):
    whole, size = entropy_statistics(*layout), layout.mask.numel()
    assert whole.shape == (ENTROPY_BUCKETS,) and whole.dtype == torch.float64 and whole.sum() == layout.mask.sum()
    part = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(layout.mask.shape)
    parts = [entropy_statistics(layout.values, layout.mask & side) for side in (part, ~part)]
    assert torch.equal(parts[0] + parts[1], whole)
    order = torch.tensor(data.draw(st.permutations(range(len(layout.mask)))))
    values, mask = layout.values[order], layout.mask[order]
    for fill in (math.nan, -math.nan, math.inf, -math.inf, 1e30):
        padded = (pad(of, (left, right), value=with_) for of, with_ in ((values, fill), (mask, False)))
        assert torch.equal(entropy_statistics(*padded), whole)


@given(place=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(place):
    width = math.log(HIGHEST_EDGE / LOWEST_EDGE) / (ENTROPY_BUCKETS - 2)
    at = math.log(1e-5) + place * (math.log(19) - math.log(1e-5))
    # A little more than a bucket apart are at least one bucket apart, a little less at most one.
    entropies = torch.tensor([at, at + 1.005 * width, at + 0.995 * width], dtype=torch.float64).exp()
    first, wider, narrower = (int(entropy_statistics(of.view(1, 1), torch.ones(1, 1)).argmax()) for of in entropies)
    assert wider - first in (1, 2) and narrower - first in (0, 1)


def test_nothing_is_fetched_to_the_host():
    # Reading any value raises on the meta device, as it would stall an accelerator.
    entropy, mask = torch.zeros(3, 7, device="meta"), torch.ones(3, 7, dtype=torch.bool, device="meta")
    for keep in ("highest", "lowest"):
        bucket, _ = selection(keep, over="mini_batch").threshold(entropy_statistics(entropy, mask))
        assert selection(keep, over="mini_batch").selected(entropy, mask, bucket).device.type == "meta"
