"""Selection and comparison on bits against torch's own, with special values. Not covered: other devices than a CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.masking import as_bits, choose, kept, less, spread

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
def test_less_is_less_than_for_all_pairs_of_special_values(dtype):
    first, second = pairs(dtype)
    found = spread(less(first, second))
    assert not found.is_floating_point() and found.element_size() == first.element_size()
    assert torch.equal(found, -(first < second).to(found.dtype))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False))
def test_less_is_less_than_a_number(first, second):
    tensor = torch.tensor([[first]], dtype=torch.float32)
    for number in (second, torch.tensor(second)):
        assert bool(spread(less(tensor, number))) == (first < second)
        assert bool(spread(less(number, tensor))) == (second < first)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("other", [0.0, -0.0])
def test_no_zero_is_less_than_another(zero, other):
    tensor = torch.tensor([[zero]])
    for number in (other, torch.tensor(other), torch.tensor([[other]])):
        assert spread(less(tensor, number)).item() == spread(less(number, tensor)).item() == 0


def test_less_takes_a_bound_a_token():
    assert spread(less(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 2.0]]))).tolist() == [[0, -1]]


def test_signs_are_combined_before_they_are_spread():
    values = torch.tensor([[0.5, 1.5, 2.5]])
    assert spread(less(1.0, values) & less(values, 2.0)).tolist() == [[0, -1, 0]]
    assert spread(~(less(values, 1.0) | less(2.0, values))).tolist() == [[0, -1, 0]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16])
def test_kept_leaves_no_trace_of_what_is_outside(dtype):
    values = torch.tensor([[1.5, math.nan, -2.0, math.inf]], dtype=dtype)
    mask = torch.tensor([[True, False, True, False]])
    expected = torch.tensor([[1.5, 0.0, -2.0, 0.0]], dtype=dtype)
    assert torch.equal(kept(values, mask), expected)
    assert torch.equal(kept(values, as_bits(mask, dtype)), expected)


@pytest.mark.parametrize("width", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bits_of_another_width_select_the_same(dtype, width):
    mask = torch.tensor([[True, False]])
    assert kept(torch.tensor([[1.5, math.nan]], dtype=dtype), as_bits(mask, width)).tolist() == [[1.5, 0.0]]


def test_choose_takes_from_both_without_mixing():
    bits = as_bits(torch.tensor([[True, False, False]]), torch.float32)
    values = torch.tensor([[1.0, math.nan, math.inf]])
    assert choose(bits, values, 7.0).tolist() == [[1.0, 7.0, 7.0]]
    assert choose(bits, values, torch.tensor([[math.nan, 5.0, 6.0]])).tolist() == [[1.0, 5.0, 6.0]]
