"""DGPO's weight by hand, its continuity, and its relation to GPPO's.

Covers ratios up to saturation. Not covered: the ends of n and m (tests/claims/test_parameters.py).
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.golden.settings import EPSILONS, Key, Setup
from verl_clipx.methods.dgpo import Dgpo
from verl_clipx.methods.gppo import Gppo

from .at import At, by_hand, row, weight

PUBLISHED = {
    "dgpo": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=None),
    "dgpo_reference": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=20.0),
}
DECAY = (Key("n", "n", 1), Key("m", "m", 2))
GOLDEN = {
    "dgpo": Setup(("+clipx=dgpo_reference",), (*EPSILONS, *DECAY)),
    "paper_dgpo": Setup(("+clipx=dgpo",), (*EPSILONS, *DECAY)),
}
# A lower end that is refused: with this all lower ends train.
TOGETHER = {0: {"clip_low": 1e-6}}
NEVER = (("clip_low", None), ("clip_high", None), ("clip_low", 0))
EXPONENTS = {"n": st.floats(0.01, 20.0), "m": st.floats(1.0, 50.0)}
BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}
E25 = math.exp(25)

test_by_hand = by_hand(
    {
        # LN: 0.4^2 / 0.8 = 0.2; HP: sqrt(1.25 * 5) = 2.5.
        "n = 1, m = 2": At(
            Dgpo(n=1, m=2, **BOUNDS),
            (0.4, 0.4, 0.8, 1.0, 1.25, 5.0, 5.0),
            (-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0),
            (0.2, 0.4, 0.8, 1.0, 1.25, 2.5, 5.0),
        ),
        # LN: 0.4^3 / 0.8^2 = 0.1; HP: 1.25^(1/3) * 10^(2/3) = 125^(1/3).
        "n = 2, m = 3": At(Dgpo(n=2, m=3, **BOUNDS), (0.4, 10.0), (-1.0, 1.0), (0.1, 5.0)),
        "power laws are not cut off by the clamp but the ratio is": At(
            Dgpo(n=1, m=2, log_ratio_clamp=20.0),
            (1 / E25, 1 / E25, E25, E25),
            (-1.0, 1.0, 1.0, -1.0),
            (E25**-2 / 0.8, 0.0, math.sqrt(1.2 * E25), 0.0),
        ),
    }
)


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
