"""Selection and comparison on bits against torch's own, with special values. Not covered: other devices than a CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.masking import as_bits, below, choose, kept

DTYPES = [torch.float32, torch.float64]
TINY = torch.finfo(torch.float32).smallest_normal
SPECIAL = [0.0, -0.0, 1.0, -1.0, TINY, -TINY, TINY / 2, 1 + 2**-23, 3e38, -3e38, math.inf, -math.inf]


def pairs(dtype):
    values = torch.tensor(SPECIAL, dtype=dtype)
    first, second = torch.meshgrid(values, values, indexing="ij")
    # The difference of two equal infinities is not a number.
    allowed = ~(first.isinf() & (first == second))
    return first[allowed][None], second[allowed][None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_is_less_than_for_all_pairs_of_special_values(dtype):
    first, second = pairs(dtype)
    found = below(first, second)
    assert not found.is_floating_point() and found.element_size() == first.element_size()
    assert torch.equal(found, -(first < second).to(found.dtype))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False))
def test_below_is_less_than(first, second):
    tensor = torch.tensor([[first]], dtype=torch.float32)
    assert bool(below(tensor, second)) == (first < second)
    assert bool(below(second, tensor)) == (second < first)


def test_below_takes_a_bound_a_token():
    assert below(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 2.0]])).tolist() == [[0, -1]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16])
def test_kept_leaves_no_trace_of_what_is_outside(dtype):
    values = torch.tensor([[1.5, math.nan, -2.0, math.inf]], dtype=dtype)
    mask = torch.tensor([[True, False, True, False]])
    expected = torch.tensor([[1.5, 0.0, -2.0, 0.0]], dtype=dtype)
    assert torch.equal(kept(values, mask), expected)
    assert torch.equal(kept(values, as_bits(mask, dtype)), expected)


def test_choose_takes_from_both_without_mixing():
    bits = as_bits(torch.tensor([[True, False, False]]), torch.float32)
    values = torch.tensor([[1.0, math.nan, math.inf]])
    assert choose(bits, values, 7.0).tolist() == [[1.0, 7.0, 7.0]]
    assert choose(bits, values, torch.tensor([[math.nan, 5.0, 6.0]])).tolist() == [[1.0, 5.0, 6.0]]
