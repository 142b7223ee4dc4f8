"""Metrics made of a mini-batch's sums: values by hand, and from tokens for which the answer is known.

Covers: the effective sample size; BAPO's Entropy-Clip estimate against the covariance of numpy; slope and R^2 of ACPO's
Lemma 1 on tokens that obey it and on others. Not covered: the sums (tests/loss/test_metrics.py); how they are added up
over micro-batches and ranks (tests/worker/test_logged_metrics.py).
"""

import math

import numpy
import pytest
import torch

from tests.methods.at import tokens_at
from verl_clipx.base.mini_batch_metrics import effective_sample_size, entropy_clip_estimate, lemma_1
from verl_clipx.loss.metrics import token_metrics, token_sums, with_ratios_of_sums
from verl_clipx.methods import Bounds


def finished(t, weighted):
    """All metrics of a mini-batch."""
    sums = token_sums(t, t.ratio, Bounds(0.8, 1.2), weighted, None, None, True)
    means = {name: [float(value / sums[0])] for name, value in token_metrics(sums, detailed=True).items()}
    return {name: values[0] for name, values in with_ratios_of_sums(means).items()}


def test_effective_sample_size_by_hand():
    assert effective_sample_size(1.0, 1.0) == 1.0
    # Ratios 3, 1, 0, 0: 16 / (4 * 10).
    assert effective_sample_size(1.0, 2.5) == pytest.approx(0.4)
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_entropy_clip_estimate_by_hand():
    # Ratios 1; log pi -1 and -3; F A 2 and -2: minus their covariance, 1 * 2.
    assert entropy_clip_estimate(1.0, -2.0, 0.0, (-1 * 2 + -3 * -2) / 2) == pytest.approx(-2.0)
    # The other way around, the entropy rises.
    assert entropy_clip_estimate(1.0, -2.0, 0.0, -2.0) == pytest.approx(2.0)
    assert entropy_clip_estimate(0.0, 0.0, 0.0, 0.0) == 0.0


def test_of_tokens_it_is_the_weighted_covariance():
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(4, 50, generator=generator, dtype=torch.float64)
    ratio = (0.4 * torch.randn(4, 50, generator=generator, dtype=torch.float64)).exp()
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64).expand(4, 50)
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    t = tokens_at(ratio, advantages, old_log_prob=old)
    found = finished(t, torch.where(clipped, 0.0, ratio * advantages))
    log_prob = (old + ratio.log()).flatten()
    covariance = numpy.cov(log_prob, (advantages * ~clipped).flatten(), aweights=ratio.flatten(), ddof=0)[0, 1]
    assert found["clipx/entropy_clip_estimate"] == pytest.approx(-covariance, rel=1e-6)
    # A constant that is added to A X changes nothing (Eq. 6's C).
    shifted = finished(t, torch.where(clipped, 0.0, ratio * advantages) + 7 * ratio)
    assert shifted["clipx/entropy_clip_estimate"] == pytest.approx(-covariance, rel=1e-6)


def spread_tokens(power):
    """Tokens of every probability, half of them above a ratio of 1 and half as far below."""
    probability = torch.linspace(0.01, 0.99, 400, dtype=torch.float64).repeat_interleave(2)[None]
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(400)[None]
    ratio = 1 + 0.1 * sign * (1 - probability) ** power
    return tokens_at(ratio, torch.ones_like(ratio), old_log_prob=probability.log())


def test_tokens_that_obey_lemma_1():
    t = spread_tokens(2)
    found = finished(t, t.ratio)
    assert found["clipx/lemma_1/slope"] == pytest.approx(2.0, rel=1e-6)
    assert found["clipx/lemma_1/r_squared"] == pytest.approx(1.0, rel=1e-6)
    t = spread_tokens(1)
    assert finished(t, t.ratio)["clipx/lemma_1/slope"] == pytest.approx(1.0, abs=0.05)


def test_a_spread_that_does_not_depend_on_the_probability():
    t = spread_tokens(0)
    assert abs(finished(t, t.ratio)["clipx/lemma_1/slope"]) < 1e-6


def test_no_line_through_two_bins_or_none():
    ones = numpy.ones(8)
    assert lemma_1(ones, 0 * ones, 0 * ones, ones) is None
    spread = numpy.array([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    assert lemma_1(ones, 0 * ones, spread, ones * 0.5) is None
    assert lemma_1(0 * ones, 0 * ones, 0 * ones, 0 * ones) is None


def test_bins_weigh_by_their_tokens():
    x, y = numpy.array([0.0, 1.0, 2.0]), numpy.array([0.0, 1.0, 0.0])
    count = numpy.array([1.0, 1.0, 1e9])
    slope, r_squared = lemma_1(count, 0 * x, count * numpy.exp(2 * y), count * numpy.exp(4 * x))
    # Through the last point, between the others: least squares of (2, 0) and (1, -1) about it.
    assert slope == pytest.approx((-2 * 0 + -1 * 1) / (4 + 1), rel=1e-6)
    assert 0 <= r_squared <= 1


def test_the_last_updates_spread_alone():
    t, moved = tokens_at(torch.ones(1, 800, dtype=torch.float64), torch.ones(1, 800)), spread_tokens(2)
    updates = []
    for one in (t, moved):
        sums = token_sums(one, one.ratio, Bounds(0.8, 1.2), one.ratio, None, None, True)
        updates.append({name: float(value / sums[0]) for name, value in token_metrics(sums, detailed=True).items()})
    both = with_ratios_of_sums({name: [update[name] for update in updates] for name in updates[0]})
    assert both["clipx/lemma_1/slope"] == [pytest.approx(2.0)]
    assert len(both["clipx/effective_sample_size"]) == 2 and both["clipx/effective_sample_size"][0] == 1.0
    other = with_ratios_of_sums({name: [update[name] for update in updates[::-1]] for name in updates[0]})
    assert "clipx/lemma_1/slope" not in other
    assert math.isfinite(other["clipx/entropy_clip_estimate"][1])


def test_metrics_of_another_loss_stay():
    assert with_ratios_of_sums({"actor/ppo_kl": [1.0]}) == {"actor/ppo_kl": [1.0]}
