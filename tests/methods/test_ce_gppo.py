"""CE-GPPO's weight by hand and its relation to GPPO's. Does not cover the loss around it."""

import torch

from verl_clipx.methods.ce_gppo import CeGppo
from verl_clipx.methods.gppo import Gppo

from .at import row, weight

BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}


def test_weight_by_hand():
    ratio, advantages = row(0.5, 0.5, 1.0, 1.25, 2.0, 2.0, 4.0), row(-1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0)
    found = weight(CeGppo(beta_low=0.5, beta_high=2.0, **BOUNDS), ratio, advantages)
    assert found.tolist() == [[0.4, 0.5, 1.0, 1.25, 2.5, 2.0, 4.0]]


def test_dual_clip_drops_negative_tokens_above_it_and_no_others():
    found = weight(CeGppo(dual_clip=3.0, **BOUNDS), row(3.0, 4.0, 4.0), row(-1.0, -1.0, 1.0))
    assert found.tolist() == [[3.0, 0.0, 1.25]]


def test_betas_of_one_are_gppo():
    ratio, advantages = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    ours = CeGppo(beta_low=1.0, beta_high=1.0, log_ratio_clamp=5.0, **BOUNDS)
    gppos = Gppo(log_ratio_clamp=5.0, **BOUNDS)
    ratio = (3 * ratio).exp()
    assert torch.equal(weight(ours, ratio, advantages), weight(gppos, ratio, advantages))
