"""ASPO's weight by hand, for its authors' reading and for the one that DGPO's rows train.

Does not cover the loss around it.
"""

import math

import pytest

from tests.composition import built_once
from verl_clipx.methods.aspo import Aspo

from .at import row, weight

BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}


def test_authors_reading_by_hand():
    ratio = row(0.25, 0.5, 1.25, 2.0, 0.5, 0.8, 2.0, 4.0)
    advantages = row(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0)
    assert weight(Aspo(**BOUNDS), ratio, advantages).tolist() == [[3.0, 2.0, 0.8, 0.0, 0.0, 0.8, 2.0, 3.0]]


def test_dgpo_s_rows_by_hand():
    ratio = row(0.125, 0.5, 1.25, 2.0, 0.5, 0.8, 1.0, 4.0)
    advantages = row(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0)
    weights = weight(Aspo(flip="both", weight_low=0.67, weight_high=4.0, **BOUNDS), ratio, advantages)
    assert weights.tolist() == [[4.0, 2.0, 0.8, 0.0, 0.0, 1.25, 1.0, 0.67]]


def test_the_group_of_dgpo_s_rows_swaps_the_caps_that_eq_6_prints():
    """DGPO's Table 1: LP is a small ratio with A > 0, where Eq. 6 prints 1 - 0.33; HN a large one with A < 0: 1 + 3."""
    low, high = 0.67, 4.0
    method = built_once(("+clipx=aspo_dgpo",)).policy_loss.clipx.method
    # Printed: [low, high].
    assert weight(method, row(0.1, 10.0), row(1.0, -1.0)).tolist() == [[high, low]]


def test_caps_can_be_left_out():
    found = weight(Aspo(weight_high=None, negative_weight_high=None), row(0.01, 100.0), row(1.0, -1.0))
    assert found.tolist() == [[100.0, 100.0]]


@pytest.mark.parametrize(("negative_weight_high", "negative"), [(3.0, 3.0), (None, 0.0)])
def test_a_capped_token_keeps_its_gradient_beyond_the_clamp(negative_weight_high, negative):
    method = Aspo(negative_weight_high=negative_weight_high, log_ratio_clamp=20.0)
    found = weight(method, row(math.exp(-25), math.exp(25)), row(1.0, -1.0))
    assert found.tolist() == [[3.0, negative]]
