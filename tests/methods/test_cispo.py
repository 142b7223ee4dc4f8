"""CISPO's weight and value by hand. Does not cover that the clamp leaves its gradient alone (test_loss.py)."""

import pytest
import torch

from verl_clipx.methods.cispo import Cispo

from .at import row, tokens_at, weight


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_every_token_keeps_the_clamped_ratio(advantage):
    ratio = row(0.5, 0.8, 1.0, 1.2, 9.0)
    found = weight(Cispo(clip_low=0.8, clip_high=1.2), ratio, torch.full_like(ratio, advantage))
    assert found.tolist() == [[0.8, 0.8, 1.0, 1.2, 1.2]]


def test_minimax_has_no_lower_bound():
    assert weight(Cispo(clip_low=None, clip_high=5.0), row(1e-6, 9.0), row(-1.0, 1.0)).tolist() == [[1e-6, 5.0]]


def test_no_token_loses_its_gradient_to_the_clamp():
    found = weight(Cispo(clip_low=None, clip_high=None, log_ratio_clamp=2.0), row(1e-6, 9.0), row(-1.0, 1.0))
    assert found.log().tolist() == [[pytest.approx(-2.0), pytest.approx(2.0)]]


def test_mask_drops_what_ppo_with_the_masks_bounds_would_clip():
    ratio = row(0.5, 0.5, 0.75, 1.3, 1.4, 1.4, 2.0)
    advantages = row(-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0)
    found = weight(Cispo(clip_low=None, clip_high=1.45, mask_low=0.75, mask_high=1.3), ratio, advantages)
    assert found.tolist() == [[0.0, 0.5, 0.75, 1.3, 0.0, 1.4, 1.45]]


@pytest.mark.parametrize(("side", "expected"), [({"mask_low": 0.8}, [0.0, 2.0]), ({"mask_high": 1.2}, [0.5, 0.0])])
def test_each_side_of_the_mask_stands_alone(side, expected):
    found = weight(Cispo(clip_low=None, clip_high=3.0, **side), row(0.5, 2.0), row(-1.0, 1.0))
    assert found.tolist() == [expected]


def test_value():
    t = tokens_at(row(0.8, 1.2), row(2.0, -1.0))._replace(log_prob=row(-3.0, -0.5))
    value = Cispo().loss_value(t, None, t.ratio)
    assert value.tolist() == [[pytest.approx(4.8), pytest.approx(-0.6)]]
