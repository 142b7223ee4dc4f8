"""CE-GPPO's weight by hand and its relation to GPPO's. Does not cover the veRL-facing adapter."""

import torch

from verl_clipx.losses import gppo
from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ce_gppo import gradient_weight

BOUNDS = Bounds(0.8, 1.25)


def _rows(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_weight_by_hand():
    ratio = _rows(0.5, 0.5, 1.0, 1.25, 2.0, 2.0, 4.0)
    advantages = _rows(-1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0)
    weight = gradient_weight(ratio, advantages, BOUNDS, beta_low=0.5, beta_high=2.0)
    assert weight.tolist() == [[0.4, 0.5, 1.0, 1.25, 2.5, 2.0, 4.0]]


def test_dual_clip_drops_negative_tokens_above_it_and_no_others():
    ratio, advantages = _rows(3.0, 4.0, 4.0), _rows(-1.0, -1.0, 1.0)
    weight = gradient_weight(ratio, advantages, BOUNDS, beta_low=0.75, beta_high=1.0, dual_clip=3.0)
    assert weight.tolist() == [[3.0, 0.0, 1.25]]


def test_betas_of_one_are_gppo():
    generator = torch.Generator().manual_seed(0)
    ratio = (3 * torch.randn(8, 64, generator=generator)).exp()
    advantages = torch.randn(8, 64, generator=generator)
    ours = gradient_weight(ratio, advantages, BOUNDS, beta_low=1.0, beta_high=1.0, log_ratio_clamp=5.0)
    assert torch.equal(ours, gppo.gradient_weight(ratio, advantages, BOUNDS, log_ratio_clamp=5.0))
