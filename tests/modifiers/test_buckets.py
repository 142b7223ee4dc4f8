"""The histograms from which entropy selection and Lopti take a quantile of the mini-batch: one table of what both keep.
Not covered: how a worker sums them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from tests.modifiers.layouts import layouts
from verl_clipx.modifiers.entropy_selection import (
    ENTROPY_BUCKETS,
    HIGHEST_EDGE,
    LOWEST_EDGE,
    EntropySelection,
    entropy_statistics,
)
from verl_clipx.modifiers.lopti import (
    PROBABILITY_BUCKETS,
    low_probability,
    probability_quantile,
    probability_statistics,
)


class Kind(NamedTuple):
    """A histogram, and how a share of its tokens is chosen. Its buckets are equally wide on an axis."""

    statistics: Callable[[Tensor, Tensor], Tensor]
    chosen: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    buckets: int
    value_at: Callable[[Tensor], Tensor]
    width: float
    ends: tuple[float, float]


def of_lowest_entropy(entropy, mask, statistics, share):
    selection = EntropySelection(keep="lowest", ratio=share, over="mini_batch")
    return selection.selected(entropy, mask, selection.threshold(statistics)[0])


def of_low_probability(log_prob, mask, statistics, share):
    return low_probability(log_prob, eta=probability_quantile(statistics, portion=share), equal=True) & mask.bool()


KINDS = {
    "entropy": Kind(
        entropy_statistics,
        of_lowest_entropy,
        ENTROPY_BUCKETS,
        torch.exp,
        math.log(HIGHEST_EDGE / LOWEST_EDGE) / (ENTROPY_BUCKETS - 2),
        (math.log(1e-5), math.log(19)),
    ),
    "probability": Kind(
        probability_statistics,
        of_low_probability,
        PROBABILITY_BUCKETS,
        logsigmoid,
        2 * math.log(1e6) / (PROBABILITY_BUCKETS - 2),
        (-13.7, 13.7),
    ),
}
LAYOUTS = layouts(st.sampled_from([0.0, -math.log(2), -2.0, 1.5]) | st.floats(-30.0, 12.0))
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
@given(layout=LAYOUTS, left=st.integers(0, 4), right=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_they_add_up_and_neither_padding_nor_order_changes_them(kind, layout, left, right, data):
    whole, size = kind.statistics(*layout), layout.mask.numel()
    assert whole.shape == (kind.buckets,) and whole.dtype == torch.float64 and whole.sum() == layout.mask.sum()
    part = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(layout.mask.shape)
    parts = [kind.statistics(layout.values, layout.mask & side) for side in (part, ~part)]
    assert torch.equal(parts[0] + parts[1], whole)
    order = torch.tensor(data.draw(st.permutations(range(len(layout.mask)))))
    values, mask = layout.values[order], layout.mask[order]
    padded = (pad(of, (left, right), value=fill) for of, fill in ((values, math.nan), (mask, False)))
    assert torch.equal(kind.statistics(*padded), whole)


@each_kind
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("junk", [math.nan, -math.nan, math.inf, -math.inf, 1e30])
def test_what_is_outside_the_mask_does_not_count(kind, mask_dtype, junk):
    values, mask = torch.tensor([[junk, -0.5, junk, -0.1]]), torch.tensor([[0, 1, 0, 1]])
    clean = kind.statistics(torch.tensor([[-0.5, -0.1]]), torch.ones(1, 2))
    assert torch.equal(kind.statistics(values, mask.to(mask_dtype)), clean)


@each_kind
@given(place=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(kind, place):
    at = kind.ends[0] + place * (kind.ends[1] - kind.ends[0])
    # A little more than a bucket apart are at least one bucket apart, a little less at most one.
    places = torch.tensor([at, at + 1.005 * kind.width, at + 0.995 * kind.width], dtype=torch.float64)
    first, wider, narrower = (
        int(kind.statistics(value.view(1, 1), torch.ones(1, 1)).argmax()) for value in kind.value_at(places)
    )
    assert wider - first in (1, 2) and narrower - first in (0, 1)


@each_kind
def test_nothing_is_fetched_to_the_host(kind):
    # Reading any value raises on the meta device, as it would stall an accelerator.
    values, mask = torch.zeros(3, 7, device="meta"), torch.ones(3, 7, dtype=torch.bool, device="meta")
    assert kind.chosen(values, mask, kind.statistics(values, mask), 0.5).device.type == "meta"
