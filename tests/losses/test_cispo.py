"""CISPO's weight and value by hand. Does not cover the ratio's clamp, which is the caller's."""

import pytest
import torch

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.cispo import gradient_weight, loss_value


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_every_token_keeps_the_clamped_ratio(advantage):
    ratio = _rows(0.5, 0.8, 1.0, 1.2, 9.0)
    weight = gradient_weight(ratio, torch.full_like(ratio, advantage), Bounds(0.8, 1.2))
    assert weight.tolist() == [[0.8, 0.8, 1.0, 1.2, 1.2]]


def test_minimax_has_no_lower_bound():
    assert gradient_weight(_rows(1e-6, 9.0), _rows(-1.0, 1.0), Bounds(0.0, 5.0)).tolist() == [[1e-6, 5.0]]


def test_mask_drops_what_ppo_with_the_masks_bounds_would_clip():
    ratio = _rows(0.5, 0.5, 0.75, 1.3, 1.4, 1.4, 2.0)
    advantages = _rows(-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0)
    weight = gradient_weight(ratio, advantages, Bounds(0.0, 1.45), mask_low=0.75, mask_high=1.3)
    assert weight.tolist() == [[0.0, 0.5, 0.75, 1.3, 0.0, 1.4, 1.45]]


def test_each_side_of_the_mask_stands_alone():
    ratio, advantages = _rows(0.5, 2.0), _rows(-1.0, 1.0)
    assert gradient_weight(ratio, advantages, Bounds(0.0, 3.0), mask_low=0.8).tolist() == [[0.0, 2.0]]
    assert gradient_weight(ratio, advantages, Bounds(0.0, 3.0), mask_high=1.2).tolist() == [[0.5, 0.0]]


def test_value():
    log_prob = _rows(-3.0, -0.5).requires_grad_()
    value = loss_value(_rows(0.8, 1.2), _rows(2.0, -1.0), log_prob)
    assert value.tolist() == [[pytest.approx(4.8), pytest.approx(-0.6)]]
    assert not value.requires_grad


def test_value_in_half_precision_is_computed_in_the_weights_dtype():
    value = loss_value(torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.tensor([[-0.5]], dtype=torch.bfloat16))
    assert value.dtype == torch.float32
