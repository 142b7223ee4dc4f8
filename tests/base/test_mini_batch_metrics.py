"""Metrics made of a mini-batch's sums: values by hand, and BAPO's Entropy-Clip estimate against numpy's covariance. Not
covered: the sums (tests/loss/test_metrics.py), adding them up (tests/worker/test_logged_metrics.py).
"""

import numpy
import pytest
import torch

from tests.methods.at import tokens_at
from verl_clipx.base.mini_batch_metrics import effective_sample_size, entropy_clip_estimate
from verl_clipx.loss.metrics import token_metrics, token_sums, with_ratios_of_sums
from verl_clipx.methods import Bounds


def finished(t, weighted):
    """All metrics of a mini-batch."""
    sums = token_sums(t, t.ratio, Bounds(0.8, 1.2), weighted, None, None, True)
    means = {name: [float(value / sums[0])] for name, value in token_metrics(sums, detailed=True).items()}
    return {name: values[0] for name, values in with_ratios_of_sums(means).items()}


def test_by_hand():
    assert effective_sample_size(1.0, 1.0) == 1.0
    # Ratios 3, 1, 0, 0: 16 / (4 * 10).
    assert effective_sample_size(1.0, 2.5) == pytest.approx(0.4)
    # Ratios 1; log pi -1 and -3; F A 2 and -2: minus their covariance, 1 * 2. The other way around, the entropy rises.
    assert entropy_clip_estimate(1.0, -2.0, 0.0, (-1 * 2 + -3 * -2) / 2) == pytest.approx(-2.0)
    assert entropy_clip_estimate(1.0, -2.0, 0.0, -2.0) == pytest.approx(2.0)
    assert effective_sample_size(0.0, 0.0) == entropy_clip_estimate(0.0, 0.0, 0.0, 0.0) == 0.0
    # Another loss has no such sums.
    assert with_ratios_of_sums({"actor/ppo_kl": [1.0]}) == {"actor/ppo_kl": [1.0]}


def test_of_tokens_the_estimate_is_the_weighted_covariance():
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(4, 50, generator=generator, dtype=torch.float64)
    ratio = (0.4 * torch.randn(4, 50, generator=generator, dtype=torch.float64)).exp()
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64).expand(4, 50)
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    t = tokens_at(ratio, advantages, old_log_prob=old)
    log_prob = (old + ratio.log()).flatten()
    covariance = numpy.cov(log_prob, (advantages * ~clipped).flatten(), aweights=ratio.flatten(), ddof=0)[0, 1]
    # A constant that is added to A X changes nothing (Eq. 6's C).
    for constant in (0, 7):
        found = finished(t, torch.where(clipped, 0.0, ratio * advantages) + constant * ratio)
        assert found["clipx/entropy_clip_estimate"] == pytest.approx(-covariance, rel=1e-6)
