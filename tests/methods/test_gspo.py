"""GSPO's weight and value by hand, and against verl's own gspo.

Covers the sequence's ratio, both bounds, verl's clamp, loss, gradient and metrics under every aggregation, and the
paper's Eq. 5 by autograd. Does not cover splits inside a sequence, which verl does not make for a loss.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.check.contract import evaluate
from verl_clipx.loss.metrics import token_metrics, token_sums
from verl_clipx.methods.gspo import Gspo

from .against_verl import ACTOR, AGGREGATIONS, assert_same_as_verl, ragged
from .at import row, tokens_at, weight_and_value

OURS = ("+clipx=gspo",)
VERLS = (
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    f"{ACTOR}.clip_ratio_low=3e-4",
    f"{ACTOR}.clip_ratio_high=4e-4",
)
SAME_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl")


@pytest.mark.parametrize(
    ("ratios", "advantage", "expected", "loss"),
    [
        # The geometric mean of 4 and 1/4 is 1, far as both tokens are from it.
        ((4.0, 0.25), 1.0, 1.0, -1.0),
        ((4.0, 1.0), 1.0, 0.0, -1.25),
        ((4.0, 1.0), -1.0, 2.0, 2.0),
        ((0.25, 1.0), -2.0, 0.0, 1.6),
        ((0.25, 1.0), 2.0, 0.5, -1.0),
        ((1.25, 1.25), 1.0, 1.25, -1.25),
        ((0.25, 1.0), 0.0, 0.5, 0.0),
    ],
)
def test_weight_and_value_by_hand(ratios, advantage, expected, loss):
    method = Gspo(clip_low=0.8, clip_high=1.25 + 1e-12)
    found, value = weight_and_value(method, row(*ratios), row(advantage, advantage))
    assert_close(found, row(expected, expected))
    assert_close(value, row(loss, loss))


def test_the_papers_bounds():
    near = row(0.9996, 0.9998, 1.0003, 1.0005).T
    negative, positive = (weight_and_value(Gspo(), near, torch.full_like(near, A))[0] for A in (-1.0, 1.0))
    assert_close(negative, row(0.0, 0.9998, 1.0003, 1.0005).T)
    assert_close(positive, row(0.9996, 0.9998, 1.0003, 0.0).T)


def test_tokens_outside_the_mask_do_not_count():
    mask = row(True, True, False, dtype=torch.bool)
    t = tokens_at(row(4.0, 1.0, 1.0), row(-1.0, -1.0, 0.0), mask=mask)
    assert_close(Gspo().bounded(t), row(2.0, 2.0, 2.0))


def test_a_token_is_not_clamped_only_the_sequence_is():
    # Log-ratios of 30 and -20 have a mean of 5; those of 30 and -8 one of 11.
    inside, beyond = (row(math.exp(30), math.exp(low)) for low in (-20, -8))
    method = Gspo(clip_low=None, clip_high=None)
    assert_close(weight_and_value(method, inside, row(-1.0, -1.0))[0], row(math.exp(5), math.exp(5)))
    found, value = weight_and_value(method, beyond, row(-1.0, -1.0))
    assert found.tolist() == [[0.0, 0.0]]
    assert_close(value, row(math.exp(10), math.exp(10)))
    free = Gspo(clip_low=None, clip_high=None, log_ratio_clamp=None)
    assert_close(weight_and_value(free, beyond, row(-1.0, -1.0))[0], row(math.exp(11), math.exp(11)))
    # There is no clamp below.
    small = row(math.exp(-15), math.exp(-15))
    assert_close(weight_and_value(method, small, row(1.0, 1.0))[0], small)


def test_regions_are_counted_by_the_sequences_ratio():
    method = Gspo(clip_low=0.8, clip_high=1.25)
    # Tokens beyond the bounds in a sequence that is not, and the other way around.
    t = tokens_at(torch.stack([row(4.0, 0.25)[0], row(1.0, 4.0)[0]]), torch.ones(2, 2, dtype=torch.float64))
    bounds = method.bounds(t, method.decide(method.statistics(t)))
    weighted = method.gradient_weight(t, bounds) * t.advantages
    metrics = token_metrics(token_sums(t, method.bounded(t), bounds, weighted, None, None, True), detailed=True)
    assert metrics["clipx/clip_fraction_high"] == 2 and metrics["clipx/region_fraction/M"] == 2
    assert metrics["clipx/gradient_mass/HP"] == 0


# Sequences inside and outside the bounds, well outside, and beyond the clamp.
@pytest.mark.parametrize("spread", [4e-3, 0.5, 30.0])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_same_as_verls_own(spread, mode, seed):
    # Its metric of the log-ratio clamps no token, ours at 10.
    metrics = SAME_METRICS if spread < 10 else SAME_METRICS[:1]
    batch = ragged(seed, spread=spread)
    if spread > 10:
        batch["log_prob"][0, :] = batch["old_log_prob"][0, :] + 12
    assert_same_as_verl(OURS, VERLS, batch, mode, metrics)


@pytest.mark.parametrize("seed", [0, 1])
def test_each_branch_occurs_beside_verls(seed):
    batch = ragged(seed, spread=4e-3)
    mask, A = batch.pop("response_mask"), batch["advantages"]
    dropped = evaluate(Gspo(), **batch, mask=mask).weight == 0
    for sign in (A > 0, A < 0):
        assert (dropped & sign & mask).any() and (~dropped & sign & mask).any()


def test_gradient_of_the_papers_objective():
    batch = ragged(3, spread=1e-3, sequences=6)
    mask, A = batch["response_mask"][:5], batch["advantages"][:5, :1].expand(-1, 12)
    log_prob, old_log_prob = batch["log_prob"][:5].clone().requires_grad_(True), batch["old_log_prob"][:5]
    lengths = mask.sum(-1)
    # Eq. 5 and 7 as printed, a term a sequence.
    s = (torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1) / lengths).exp()
    (-torch.minimum(s * A[:, 0], s.clamp(0.9997, 1.0004) * A[:, 0])).mean().backward()
    found = evaluate(Gspo(), log_prob=log_prob, old_log_prob=old_log_prob, advantages=A, mask=mask)
    per_sequence = torch.where(mask, -found.weight * A, 0.0) / lengths[:, None]
    assert_close(per_sequence / len(mask), log_prob.grad)
    assert log_prob.grad.any()
