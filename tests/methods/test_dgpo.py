"""DGPO's weight by hand, its continuity, and its relation to GPPO's.

Covers ratios up to saturation. Does not cover the ends of n and m, which tests/claims/test_parameters.py does.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.methods.dgpo import Dgpo
from verl_clipx.methods.gppo import Gppo

from .at import row, weight

EXPONENTS = {"n": st.floats(0.01, 20.0), "m": st.floats(1.0, 50.0)}


def test_weight_by_hand():
    ratio = row(0.4, 0.4, 0.8, 1.0, 1.25, 5.0, 5.0)
    advantages = row(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0)
    found = weight(Dgpo(clip_low=0.8, clip_high=1.25, n=1, m=2), ratio, advantages)
    # LN: 0.4^2 / 0.8 = 0.2; HP: sqrt(1.25 * 5) = 2.5.
    assert_close(found, row(0.2, 0.4, 0.8, 1.0, 1.25, 2.5, 5.0), rtol=1e-15, atol=0)


def test_higher_exponents_by_hand():
    found = weight(Dgpo(clip_low=0.8, clip_high=1.25, n=2, m=3), row(0.4, 10.0), row(-1.0, 1.0))
    # LN: 0.4^3 / 0.8^2 = 0.1; HP: 1.25^(1/3) * 10^(2/3) = 125^(1/3).
    assert_close(found, row(0.1, 5.0), rtol=1e-14, atol=0)


@given(low=st.floats(0.1, 1.0), high=st.floats(1.0, 5.0), **EXPONENTS)
@settings(deadline=None)
def test_continuous_at_both_bounds(low, high, n, m):
    step = 1e-9
    for bound, advantage in ((low, -1.0), (high, 1.0)):
        around = row(bound * (1 - step), bound, bound * (1 + step))
        found = weight(Dgpo(clip_low=low, clip_high=high, n=n, m=m), around, torch.full_like(around, advantage))
        # The relative slope is at most n + 1 on the left side and 1 on the right one.
        assert_close(found, torch.full_like(around, bound), rtol=2 * step * (n + 1), atol=0)


@given(log_ratio=st.floats(-300, 300), advantage=st.floats(-2, 2))
@settings(deadline=None)
def test_m_of_one_gives_gppos_constant_on_the_right(log_ratio, advantage):
    ratio, advantages = row(log_ratio).exp(), row(advantage)
    if not (ratio < 0.8 and advantage < 0):
        ours, gppos = (weight(method, ratio, advantages) for method in (Dgpo(m=1), Gppo(log_ratio_clamp=None)))
        assert_close(ours, gppos, rtol=1e-14, atol=0)


@given(**EXPONENTS)
@settings(deadline=None)
def test_weight_falls_behind_the_ratio_the_further_it_is_out(n, m):
    ratio = torch.logspace(-4, 4, 33, dtype=torch.float64)[None]
    left, right = (weight(Dgpo(n=n, m=m), ratio, torch.full_like(ratio, sign)) for sign in (-1.0, 1.0))
    assert (left / ratio).diff().ge(0).all()
    assert (right / ratio).diff().le(0).all()
    assert (left <= ratio).all()
    assert (right <= ratio).all()


def test_power_laws_are_not_cut_off_by_the_clamp_but_the_ratio_is():
    ratio, advantages = row(*(math.exp(-25),) * 2, *(math.exp(25),) * 2), row(-1.0, 1.0, 1.0, -1.0)
    found = weight(Dgpo(n=1, m=2, log_ratio_clamp=20.0), ratio, advantages)
    assert_close(found, row(math.exp(-50) / 0.8, 0.0, math.sqrt(1.2 * math.exp(25)), 0.0), rtol=1e-14, atol=0)
