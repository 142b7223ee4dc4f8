"""TOPR's sequence ratio, limits and weights by hand, and against autograd.

Covers both levels, and what the metrics count as clipped. Does not cover the contract and micro-batches
(test_properties.py), or the paper's rewards, which stand where verl's advantages do.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.check.contract import example
from verl_clipx.methods.topr import Topr

from .at import row, tokens_at


def rows(*sequences):
    return torch.tensor(sequences, dtype=torch.float64)


# Products 0.3, 0.3, 3, 3 and, without the masked token, 0.5.
RATIO = rows([0.5, 0.6], [0.5, 0.6], [1.5, 2.0], [1.5, 2.0], [0.5, 9.0])
ADVANTAGES = rows([-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [-2.0, -2.0])
MASK = torch.tensor([[True, True]] * 4 + [[True, False]])


def weight(method, ratio=RATIO, advantages=ADVANTAGES, mask=MASK):
    t = tokens_at(ratio, advantages, mask=mask, clamp=method.log_ratio_clamp)
    return method.gradient_weight(t, method.bounds(t, method.decide(method.statistics(t))))


def test_a_sequence_has_one_weight():
    expected = [[0.3, 0.3], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]
    assert_close(weight(Topr()), rows(*expected))


def test_a_token_has_its_own():
    assert_close(weight(Topr(level="token")), rows([0.5, 0.6], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.5, 1.0]))


def test_limits_by_hand():
    method = Topr(positive_low=0.5, positive_high=2.0, negative_low=0.4, negative_high=0.45)
    assert_close(weight(method)[:, 0], row(0.4, 0.5, 0.45, 2.0, 0.45)[0])
    # Truncated importance sampling.
    method = Topr(positive_low=0.0, positive_high=1.0)
    assert_close(weight(method)[:, 0], row(0.3, 0.3, 1.0, 1.0, 0.5)[0])


def test_an_advantage_of_zero_is_positive():
    assert weight(Topr(), row(0.5), row(0.0), None).tolist() == [[1.0]]


def test_the_clamp_acts_on_each_token_and_takes_no_gradient():
    # Log-ratios -3 and 2.5, clamped to -1 and 1.
    ratio = rows([math.exp(-3.0), math.exp(2.5)])
    assert_close(weight(Topr(log_ratio_clamp=1.0), ratio, rows([-1.0, -1.0]), None), rows([1.0, 1.0]))
    assert_close(weight(Topr(), ratio, rows([-1.0, -1.0]), None), torch.full((1, 2), math.exp(-0.5)).double())


@given(log_ratio=st.lists(st.floats(-5, 5), min_size=1, max_size=20))
@settings(deadline=None)
def test_the_sequence_ratio_is_the_product(log_ratio):
    ratio = row(*log_ratio).exp()
    t = tokens_at(ratio, torch.ones_like(ratio))
    assert Topr().bounded(t).tolist()[0] == pytest.approx([math.exp(math.fsum(log_ratio))] * len(log_ratio), rel=1e-12)


def regions(method):
    t = tokens_at(RATIO, ADVANTAGES, mask=MASK)
    bounds, bounded = method.bounds(t, None), method.bounded(t)
    return (bounded < bounds.low).tolist(), (bounded > bounds.high).tolist()


def test_nothing_counts_as_dropped():
    below, above = regions(Topr())
    assert not any(map(any, below))
    # Only the negative sequence whose weight is cut to 1.
    assert above == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2]


def test_limits_that_differ_are_bounds():
    below, above = regions(Topr(positive_low=0.5, positive_high=2.0, negative_low=1.0, negative_high=1.0))
    assert below == [[False] * 2, [True] * 2, [False] * 2, [False] * 2, [False] * 2]
    assert above == [[False] * 2, [False] * 2, [False] * 2, [True] * 2, [False] * 2]


def test_value():
    t = tokens_at(row(0.5), row(-2.0), old_log_prob=row(-1.0))
    assert Topr().loss_value(t, None, row(0.5)).tolist() == [[pytest.approx(math.log(0.5) - 1.0)]]


def test_on_policy_it_is_reinforce():
    t = tokens_at(torch.ones_like(RATIO), ADVANTAGES, mask=MASK)
    assert (Topr().gradient_weight(t, Topr().bounds(t, None)) == 1).all()


def topr_by_autograd(batch):
    """The paper's Eq. 8 for sequences: a detached weight times A times the sequence's log-probability."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    total = 0.0
    for i in range(len(log_prob)):
        tokens = batch["response_mask"][i]
        if tokens.any():
            now, then = log_prob[i][tokens].sum(), batch["old_log_prob"][i][tokens].sum()
            A = batch["advantages"][i, 0]
            total = total - (1.0 if A >= 0 else min((now - then).exp().item(), 1.0)) * A * now
    loss = total / batch["response_mask"].sum()
    loss.backward()
    return loss.detach(), log_prob.grad


@pytest.mark.parametrize("seed", range(4))
def test_the_registered_loss_against_autograd(seed):
    batch = example(seed=seed)
    batch = {
        **{name: batch[name] for name in ("log_prob", "old_log_prob", "advantages")},
        "response_mask": batch["mask"],
    }
    loss, gradient, metrics = registered_loss(built_once(("+clipx=topr",)), batch)
    expected_loss, expected_gradient = topr_by_autograd(batch)
    assert_close(loss, expected_loss)
    assert_close(gradient, expected_gradient)
    assert metrics["actor/pg_clipfrac"] == 0


def test_limits_that_cross_are_refused():
    with pytest.raises(ValueError, match=r"clipx\.negative_low=0\.9: must not be above clipx\.negative_high=0\.8\."):
        Topr(negative_low=0.9, negative_high=0.8)
