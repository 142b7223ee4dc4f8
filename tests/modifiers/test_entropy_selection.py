"""Entropy selection by hand and against a plain Python selection, per sequence and over a mini-batch.

Does not cover ACPO's released selections (tests/worker/test_golden_tokens.py), the loss of the selected tokens, or
how a worker sums the statistics.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.modifiers.layouts import layouts, padded
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


@pytest.mark.parametrize("mask_dtype", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keep", "fraction", "expected"),
    [
        ("highest", 0.01, [0, 1, 0, 0, 0]),
        ("highest", 0.5, [1, 1, 0, 0, 0]),  # 2 of 4; the first and the fourth are equal, the first is taken
        ("highest", 0.75, [1, 1, 0, 1, 0]),
        ("highest", 1.0, [1, 1, 0, 1, 1]),
        ("lowest", 0.01, [0, 0, 0, 0, 1]),
        ("lowest", 0.5, [1, 0, 0, 0, 1]),
        ("lowest", 0.75, [1, 0, 0, 1, 1]),
        ("lowest", 0.99, [1, 0, 0, 1, 1]),  # the whole part of 3.96
    ],
)
def test_selection_per_sequence_by_hand(keep, fraction, expected, dtype, mask_dtype):
    # Beside it a sequence of one token and one without any.
    entropy = torch.tensor([ENTROPY, [math.nan] * 4 + [7.0], [math.nan] * 5], dtype=dtype)
    mask = torch.tensor([MASK, [0, 0, 0, 0, 1], [0] * 5]).to(mask_dtype)
    actual = selection(keep, fraction).selected(entropy, mask)
    assert actual.dtype == torch.bool
    assert actual.int().tolist() == [expected, [0, 0, 0, 0, 1], [0] * 5]


def test_no_gradient_is_asked_of_the_entropy():
    entropy = torch.rand(2, 3, requires_grad=True)
    mask = torch.ones(2, 3)
    assert not entropy_statistics(entropy, mask).requires_grad
    assert selection("highest", 0.5).selected(entropy, mask).sum() == 2


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


@given(layout=LAYOUTS, keep=KEEPS, fraction=FRACTIONS, left=st.integers(0, 4), right=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_padding_and_the_order_of_sequences_change_nothing(layout, keep, fraction, left, right, data):
    order = torch.tensor(data.draw(st.permutations(range(len(layout.mask)))))
    entropy = padded(layout.values[order], math.nan, left=left, right=right)
    mask = padded(layout.mask[order], False, left=left, right=right)
    expected = selection(keep, fraction).selected(*layout)[order]
    actual = selection(keep, fraction).selected(entropy, mask)
    assert (actual == padded(expected, False, left=left, right=right)).all()
    assert (selection("highest", fraction).counts(mask) == expected.sum(1)).all()

    statistics = entropy_statistics(*layout)
    assert (entropy_statistics(entropy, mask) == statistics).all()
    bucket, _ = selection(keep, fraction).threshold(statistics)
    over_all = selection(keep, over="mini_batch")
    chosen = over_all.selected(*layout, bucket)[order]
    assert (over_all.selected(entropy, mask, bucket) == padded(chosen, False, left=left, right=right)).all()


@pytest.mark.parametrize("junk", [math.nan, -math.nan, math.inf, -math.inf, 0.5, 1e30])
@pytest.mark.parametrize("keep", ["highest", "lowest"])
def test_no_junk_outside_the_mask_changes_anything(keep, junk):
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
    entropy = torch.tensor([[junk, 0.5, junk, 0.5, 0.1, junk]])
    expected = {"highest": [[0, 1, 0, 1, 0, 0]], "lowest": [[0, 1, 0, 0, 1, 0]]}[keep]
    assert selection(keep, 0.67).selected(entropy, mask).int().tolist() == expected
    statistics = entropy_statistics(entropy, mask)
    assert statistics.sum() == 3
    bucket, selected = selection(keep, 1.0).threshold(statistics)
    assert selected == 3
    assert (selection(keep, over="mini_batch").selected(entropy, mask, bucket) == mask.bool()).all()


@pytest.mark.parametrize("mask_dtype", MASKS)
def test_counts_by_hand(mask_dtype):
    mask = torch.tensor([[1] * 10, [1] * 4 + [0] * 6, [0] * 9 + [1], [0] * 10]).to(mask_dtype)
    assert selection("highest", 0.3).counts(mask).tolist() == [3, 1, 1, 0]
    assert selection("highest", 1.0).counts(mask).tolist() == [10, 4, 1, 0]
    assert selection("highest", 0.3).counts(mask).dtype == torch.int64


def test_counts_are_the_whole_part_of_pythons_product():
    # 0.29 * 100 is 28.999999999999996 in Python, and so 28; in float32 it would be 29.
    assert selection("highest", 0.29).counts(torch.ones(1, 100)).tolist() == [int(100 * 0.29)] == [28]


@given(layout=LAYOUTS, data=st.data())
@settings(deadline=None)
def test_statistics_are_additive(layout, data):
    part = torch.tensor(data.draw(st.lists(st.booleans(), min_size=layout.mask.numel(), max_size=layout.mask.numel())))
    part = part.view(layout.mask.shape)
    parts = [entropy_statistics(layout.values, layout.mask & side) for side in (part, ~part)]
    whole = entropy_statistics(*layout)
    assert (parts[0] + parts[1] == whole).all()
    assert whole.shape == (ENTROPY_BUCKETS,)
    assert whole.dtype == torch.float64
    assert whole.sum() == layout.mask.sum()


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


def test_threshold_by_hand():
    entropy = torch.tensor([[0.5, 2.0, math.nan], [0.5, 0.1, 0.5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    statistics = entropy_statistics(entropy, mask)
    cases = {
        ("highest", 0.2): [[0, 1, 0], [0, 0, 0]],
        ("highest", 0.21): [[1, 1, 0], [1, 0, 1]],  # the three equal tokens together
        ("highest", 0.81): [[1, 1, 0], [1, 1, 1]],
        ("lowest", 0.2): [[0, 0, 0], [0, 1, 0]],
        ("lowest", 0.8): [[1, 0, 0], [1, 1, 1]],
        ("lowest", 1.0): [[1, 1, 0], [1, 1, 1]],
    }
    for (keep, fraction), expected in cases.items():
        bucket, selected = selection(keep, fraction).threshold(statistics)
        assert selection(keep, over="mini_batch").selected(entropy, mask, bucket).int().tolist() == expected
        assert selected.item() == sum(map(sum, expected))
        assert (bucket.dtype, bucket.dim(), selected.dtype, selected.dim()) == (torch.int64, 0, torch.float64, 0)


@pytest.mark.parametrize("keep", ["highest", "lowest"])
def test_without_tokens_nothing_is_selected(keep):
    entropy, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3)
    bucket, selected = selection(keep, 0.2).threshold(entropy_statistics(entropy, mask))
    assert 0 <= bucket < ENTROPY_BUCKETS
    assert selected == 0.0
    assert not selection(keep, over="mini_batch").selected(entropy, mask, bucket).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_outside_the_buckets_fall_into_the_open_ones(dtype):
    # Rounding can make an entropy negative; nothing real is above 20 nats.
    entropy = torch.tensor([[-1e-3, 0.0, LOWEST_EDGE / 2, 2 * HIGHEST_EDGE, math.inf]], dtype=dtype)
    counts = entropy_statistics(entropy, torch.ones(1, 5))
    assert counts[0] == 3
    assert counts[-1] == 2


@given(entropy=st.floats(1e-5, 19.0))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(entropy):
    # 0.84 % apart are at least one bucket apart, 0.80 % at most one.
    entropies = torch.tensor([[entropy], [entropy * 1.0084], [entropy * 1.0080]], dtype=torch.float64)
    first, wider, narrower = (entropy_statistics(row.view(1, 1), torch.ones(1, 1)).argmax() for row in entropies)
    assert wider - first in (1, 2)
    assert narrower - first in (0, 1)


def test_a_large_sample_is_split_to_within_the_width_of_a_bucket():
    generator = torch.Generator().manual_seed(0)
    entropy = torch.empty(64, 512, dtype=torch.float64).exponential_(2.0, generator=generator)
    mask = torch.ones(64, 512)
    bucket, selected = selection("highest", 0.2).threshold(entropy_statistics(entropy, mask))
    exact = entropy.flatten().quantile(0.8)
    threshold = entropy[selection("highest", over="mini_batch").selected(entropy, mask, bucket)].min()
    assert_close(threshold, exact, rtol=0.009, atol=0)
    assert 0.2 <= selected / mask.sum() < 0.204


def test_nothing_is_fetched_to_the_host():
    # Reading any value raises on the meta device, as it would stall an accelerator.
    entropy, mask = torch.rand(3, 7, device="meta"), torch.ones(3, 7, dtype=torch.bool, device="meta")
    assert selection("highest", 0.2).selected(entropy, mask).device.type == "meta"
    statistics = entropy_statistics(entropy, mask)
    for keep in ("highest", "lowest"):
        bucket, selected = selection(keep, 0.2).threshold(statistics)
        chosen = selection(keep, over="mini_batch").selected(entropy, mask, bucket)
        assert {tensor.device.type for tensor in (bucket, selected, chosen)} == {"meta"}


def test_the_parameters_choose_between_the_two_selections():
    entropy, mask = torch.tensor([[1.0, 2.0, 0.5, 0.4], [9.0, 8.0, 7.0, 6.0]]), torch.ones(2, 4, dtype=torch.bool)
    expected = {
        ("highest", "sequence"): [[1, 1, 0, 0], [1, 1, 0, 0]],
        ("lowest", "sequence"): [[0, 0, 1, 1], [0, 0, 1, 1]],
        ("highest", "mini_batch"): [[0, 0, 0, 0], [1, 1, 1, 1]],
        ("lowest", "mini_batch"): [[1, 1, 1, 1], [0, 0, 0, 0]],
    }
    for (keep, over), selected in expected.items():
        assert selection(keep, over=over).selected(entropy, mask).int().tolist() == selected
    # The end that is given, of a mini-batch, wins over that of these tokens; a sequence has none.
    bucket, _ = selection("highest", 0.25).threshold(entropy_statistics(entropy, mask))
    given = {
        over: EntropySelection(over=over, ratio=0.5).selected(entropy, mask, bucket)
        for over in ("sequence", "mini_batch")
    }
    assert given["mini_batch"].int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
    assert given["sequence"].int().tolist() == expected["highest", "sequence"]


@pytest.mark.parametrize(
    ("name", "value"), [("keep", "top"), ("over", "batch"), *(("ratio", value) for value in (0.0, 1.5, -0.2, math.nan))]
)
def test_wrong_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"clipx\.select\.{name}="):
        EntropySelection(**{name: value})
