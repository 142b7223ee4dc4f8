"""GPPO's weight by hand and its relation to GRPO's. Does not cover the loss around it."""

import math

import torch

from verl_clipx.methods import Bounds
from verl_clipx.methods.gppo import Gppo
from verl_clipx.methods.grpo import Grpo

from .at import row, weight

GPPO = Gppo(clip_low=0.8, clip_high=1.25)


def test_weight_by_hand():
    ratio = row(0.5, 0.5, 0.8, 1.0, 1.25, 2.0, 2.0, 2.0)
    advantages = row(-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0)
    assert weight(GPPO, ratio, advantages).tolist() == [[0.8, 0.5, 0.8, 1.0, 1.25, 1.25, 2.0, 2.0]]


def test_bounds_replace_exactly_what_grpo_zeroes():
    generator = torch.Generator().manual_seed(0)
    ratio, advantages = torch.randn(2, 8, 64, generator=generator)
    grpo = Grpo(clip_low=0.8, clip_high=1.25, dual_clip=None)
    ours, zeroed = (weight(method, ratio.exp(), advantages) for method in (GPPO, grpo))
    kept = zeroed != 0
    assert torch.equal(ours[kept], zeroed[kept])
    assert set(ours[~kept].tolist()) == set(torch.tensor([0.8, 1.25]).tolist())


def test_beyond_the_clamp_only_the_bounds_keep_a_gradient():
    ratio, advantages = row(*(math.exp(25),) * 2, *(math.exp(-25),) * 2), row(1.0, -1.0, 1.0, -1.0)
    assert weight(GPPO, ratio, advantages).tolist() == [[1.25, 0.0, 0.0, 0.8]]


def test_per_token_bounds():
    bounds = Bounds(row(0.9, 0.5), row(1.5, 1.5))
    assert weight(GPPO, row(0.7, 0.7), row(-1.0, -1.0), bounds).tolist() == [[0.9, 0.7]]
