"""ASPO's weight by hand, for its authors' reading and for Eq. 6 of the DGPO paper as printed.

Does not cover the veRL-facing adapter.
"""

import math

import pytest
import torch

from verl_clipx.losses.aspo import gradient_weight
from verl_clipx.losses.bounds import Bounds

BOUNDS = Bounds(0.8, 1.25)


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_authors_reading_by_hand():
    ratio = _rows(0.25, 0.5, 1.25, 2.0, 0.5, 0.8, 2.0, 4.0)
    advantages = _rows(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0)
    assert gradient_weight(ratio, advantages, BOUNDS).tolist() == [[3.0, 2.0, 0.8, 0.0, 0.0, 0.8, 2.0, 3.0]]


def test_printed_equation_by_hand():
    ratio = _rows(0.125, 0.5, 1.25, 2.0, 0.5, 0.8, 1.0, 4.0)
    advantages = _rows(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0)
    weight = gradient_weight(ratio, advantages, BOUNDS, flip="both", weight_low=0.67, weight_high=4.0)
    assert weight.tolist() == [[4.0, 2.0, 0.8, 0.0, 0.0, 1.25, 1.0, 0.67]]


def test_caps_can_be_left_out():
    ratio, advantages = _rows(0.01, 100.0), _rows(1.0, -1.0)
    assert gradient_weight(ratio, advantages, BOUNDS, weight_high=None, negative_weight_high=None).tolist() == [
        [100.0, 100.0]
    ]


def test_a_capped_token_keeps_its_gradient_beyond_the_clamp():
    ratio, advantages = _rows(math.exp(-25), math.exp(25)), _rows(1.0, -1.0)
    assert gradient_weight(ratio, advantages, BOUNDS, log_ratio_clamp=20.0).tolist() == [[3.0, 3.0]]
    uncapped = gradient_weight(ratio, advantages, BOUNDS, negative_weight_high=None, log_ratio_clamp=20.0)
    assert uncapped.tolist() == [[3.0, 0.0]]


def test_unknown_flip_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"flip='negative'.*'positive'.*'both'"):
        gradient_weight(_rows(1.0), _rows(1.0), BOUNDS, flip="negative")
