"""GPPO's weight by hand and its relation to GRPO's. Does not cover the veRL-facing adapter."""

import math

import torch

from verl_clipx.losses import grpo
from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.gppo import gradient_weight

BOUNDS = Bounds(0.8, 1.25)


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_weight_by_hand():
    ratio = _rows(0.5, 0.5, 0.8, 1.0, 1.25, 2.0, 2.0, 2.0)
    advantages = _rows(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0)
    assert gradient_weight(ratio, advantages, BOUNDS).tolist() == [[0.8, 0.5, 0.8, 1.0, 1.25, 1.25, 2.0, 2.0]]


def test_bounds_replace_exactly_what_grpo_zeroes():
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(8, 64, generator=generator).exp()
    advantages = torch.randn(8, 64, generator=generator)
    ours, zeroed = gradient_weight(ratio, advantages, BOUNDS), grpo.gradient_weight(ratio, advantages, BOUNDS)
    kept = zeroed != 0
    assert torch.equal(ours[kept], zeroed[kept])
    assert set(ours[~kept].tolist()) == set(torch.tensor(BOUNDS).tolist())


def test_beyond_the_clamp_only_the_bounds_keep_a_gradient():
    ratio, advantages = _rows(*(math.exp(25),) * 2, *(math.exp(-25),) * 2), _rows(1.0, -1.0, 1.0, -1.0)
    assert gradient_weight(ratio, advantages, BOUNDS, log_ratio_clamp=20.0).tolist() == [[1.25, 0.0, 0.0, 0.8]]


def test_per_token_bounds():
    bounds = Bounds(torch.tensor([[0.9, 0.5]]).double(), torch.tensor([[1.5, 1.5]]).double())
    assert gradient_weight(_rows(0.7, 0.7), _rows(-1.0, -1.0), bounds)[0, 1] == 0.7
    assert gradient_weight(_rows(0.7, 0.7), _rows(-1.0, -1.0), bounds)[0, 0] == bounds.low[0, 0]
