"""DGPO's weight by hand, its continuity, and its relation to GPPO's.

Covers any n, m > 0 and ratios up to saturation. Does not cover the veRL-facing adapter.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.losses import gppo
from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.dgpo import gradient_weight
from verl_clipx.losses.ratio import importance_ratio

EXPONENTS = st.floats(0.01, 50.0)


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_weight_by_hand():
    ratio = _rows(0.4, 0.4, 0.8, 1.0, 1.25, 5.0, 5.0)
    advantages = _rows(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0)
    weight = gradient_weight(ratio, advantages, Bounds(0.8, 1.25), n=1, m=2)
    # LN: 0.4^2 / 0.8 = 0.2; HP: sqrt(1.25 * 5) = 2.5.
    assert_close(weight, _rows(0.2, 0.4, 0.8, 1.0, 1.25, 2.5, 5.0), rtol=1e-15, atol=0)


def test_higher_exponents_by_hand():
    weight = gradient_weight(_rows(0.4, 10.0), _rows(-1.0, 1.0), Bounds(0.8, 1.25), n=2, m=3)
    # LN: 0.4^3 / 0.8^2 = 0.1; HP: 1.25^(1/3) * 10^(2/3) = 125^(1/3).
    assert_close(weight, _rows(0.1, 5.0), rtol=1e-14, atol=0)


@given(low=st.floats(0.1, 1.0), high=st.floats(1.0, 5.0), n=EXPONENTS, m=EXPONENTS)
@settings(deadline=None)
def test_continuous_at_both_bounds(low, high, n, m):
    step = 1e-9
    for bound, advantage in ((low, -1.0), (high, 1.0)):
        around = _rows(bound * (1 - step), bound, bound * (1 + step))
        weight = gradient_weight(around, torch.full_like(around, advantage), Bounds(low, high), n=n, m=m)
        # The relative slope is at most n + 1 on the left side and max(1, 1/m - 1) on the right one.
        slope = max(n + 1, 1 / m + 1)
        assert_close(weight, torch.full_like(around, bound), rtol=2 * step * slope, atol=0)


@given(log_ratio=st.floats(-300, 300), advantage=st.floats(-2, 2))
@settings(deadline=None)
def test_m_of_one_gives_gppos_constant_on_the_right(log_ratio, advantage):
    bounds, ratio, advantages = Bounds(0.8, 1.2), _rows(log_ratio).exp(), _rows(advantage)
    ours = gradient_weight(ratio, advantages, bounds, n=1, m=1)
    if not (ratio < bounds.low and advantage < 0):
        assert_close(ours, gppo.gradient_weight(ratio, advantages, bounds), rtol=1e-14, atol=0)


@given(n=EXPONENTS, m=EXPONENTS)
@settings(deadline=None)
def test_weight_falls_behind_the_ratio_the_further_it_is_out(n, m):
    ratio = torch.logspace(-4, 4, 33, dtype=torch.float64)[None]
    left = gradient_weight(ratio, -torch.ones_like(ratio), Bounds(0.8, 1.2), n=n, m=m)
    right = gradient_weight(ratio, torch.ones_like(ratio), Bounds(0.8, 1.2), n=n, m=m)
    assert (left / ratio).diff().ge(0).all()
    assert (right / ratio).diff().le(0).all()
    assert (left <= ratio).all()
    assert (right <= ratio).all()


def test_power_laws_are_not_cut_off_by_the_clamp_but_the_ratio_is():
    ratio = _rows(*(math.exp(-25),) * 2, *(math.exp(25),) * 2)
    advantages = _rows(-1.0, 1.0, 1.0, -1.0)
    weight = gradient_weight(ratio, advantages, Bounds(0.8, 1.2), n=1, m=2, log_ratio_clamp=20.0)
    assert_close(weight, _rows(math.exp(-50) / 0.8, 0.0, math.sqrt(1.2 * math.exp(25)), 0.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 2), (50, 0.01), (0.01, 50)])
def test_finite_up_to_saturation_for_any_exponents(dtype, n, m):
    _, ratio = importance_ratio(torch.tensor([[1e4, -1e4] * 2], dtype=dtype), torch.zeros(1, 4, dtype=dtype), None)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=dtype)
    for bounds in (Bounds(0.8, 1.2), Bounds(0.0, math.inf)):
        assert gradient_weight(ratio, advantages, bounds, n=n, m=m).isfinite().all()
