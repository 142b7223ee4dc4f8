"""The loss per token: value and gradient are what they are told to be; which tokens count; shaping; what is traced. Not
covered: any method's formula and what is not finite (tests/methods), the metrics (test_metrics.py), compilation,
agreement of traces with every method's loss (tests/worker/test_tracer.py).
"""

import math
from dataclasses import dataclass

import pytest
import torch

from verl_clipx.base.tokens import OPTIONAL, Inputs
from verl_clipx.loss.loss import apply, per_token_loss, token_loss, token_statistics
from verl_clipx.loss.metrics import TOKENS, token_metrics
from verl_clipx.loss.observed import ObservedTokens
from verl_clipx.loss.token_trace import observed_token_trace, token_trace
from verl_clipx.methods import Bounds, Method, method_named
from verl_clipx.modifiers import AdvantageReweighting


def test_value_and_gradient_are_independent_of_each_other():
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    value = torch.tensor([[10.0, 20.0, 30.0]], requires_grad=True)
    weighted = torch.tensor([[0.5, 0.0, -2.0]], requires_grad=True)
    loss = per_token_loss(log_prob, value, weighted)
    assert torch.equal(loss, value)
    (loss * torch.tensor([[1.0, 5.0, 3.0]])).sum().backward()
    assert log_prob.grad.tolist() == [[-0.5, 0.0, 6.0]] and value.grad is weighted.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_gradient_has_log_probs_dtype_its_largest_number_beyond_it_and_nan_stays(dtype):
    log_prob = torch.zeros(1, 3, dtype=dtype, requires_grad=True)
    per_token_loss(log_prob, torch.zeros(1, 3), torch.tensor([[1e6, 0.375, math.nan]])).sum().backward()
    assert log_prob.grad.dtype == dtype and log_prob.grad[0, 2].isnan()
    largest = 65504.0 if dtype == torch.float16 else torch.tensor(1e6, dtype=dtype).item()
    assert log_prob.grad[0, :2].tolist() == [-largest, -0.375]


def test_second_derivative_is_refused_rather_than_wrong():
    log_prob = torch.zeros(1, 1, requires_grad=True)
    loss = per_token_loss(log_prob, torch.zeros(1, 1), torch.ones(1, 1)).square().sum()
    (first,) = torch.autograd.grad(loss + loss, log_prob, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """F = 2 and a value of 10 A; the sum of the advantages is its statistic and, divided by 4, its upper bound."""

    statistics_size = 1
    asks_for = OPTIONAL

    def statistics(self, t):
        return torch.where(t.mask, t.advantages, 0.0).sum(dtype=torch.float64)[None]

    def decide(self, statistics):
        return statistics / 4

    def bounds(self, t, decision):
        return Bounds(0.0, decision.to(t.ratio.dtype))

    def gradient_weight(self, t, bounds):
        return torch.full_like(t.ratio, 2.0)

    def loss_value(self, t, bounds, weight):
        return 10 * t.advantages


METHOD = Twice()


def inputs(**given):
    tensors = {
        "log_prob": torch.zeros(2, 2),
        "old_log_prob": torch.tensor([[0.0, 0.0], [math.log(0.5), 0.0]]),
        "advantages": torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
        "mask": torch.tensor([[True, True], [True, False]]),
        **dict.fromkeys(("rollout_log_prob", "entropy"), torch.zeros(2, 2)),
        "group": torch.zeros(2, dtype=torch.int64),
        **given,
    }
    return Inputs(**tensors)


def test_a_loss_per_token_by_hand():
    assert token_statistics(METHOD, None, inputs()).tolist() == [7.0]
    value, weighted, sums = token_loss(METHOD, None, inputs(), torch.tensor([1.5], dtype=torch.float64))
    assert value.tolist() == [[10.0, 20.0], [40.0, 0.0]]
    assert weighted.tolist() == [[2.0, 4.0], [8.0, 0.0]]
    # The third token's ratio is 2 and above the bound.
    names, found = ("clip_fraction_high", "gradient_mass/HP", "gradient_mass/M"), token_metrics(sums)
    assert [found[f"clipx/{name}"] for name in names] == [1, 8, 6]
    # Tokens that do not count keep their loss.
    counting = inputs(counted=torch.tensor([[False, True], [False, True]]))
    assert token_statistics(METHOD, None, counting).tolist() == [2.0]
    *loss, sums = token_loss(METHOD, None, counting, torch.tensor([1.5], dtype=torch.float64))
    assert torch.equal(loss[0], value) and torch.equal(loss[1], weighted) and token_metrics(sums)[TOKENS] == 1.0


def test_shaping_comes_before_statistics_weight_and_value():
    shaping = AdvantageReweighting(alpha=1.0)
    assert token_statistics(METHOD, shaping, inputs()).tolist() == [5.0]
    value, weighted, _ = token_loss(METHOD, shaping, inputs(), torch.zeros(1, dtype=torch.float64))
    assert value.tolist() == [[10.0, 20.0], [20.0, 0.0]]
    assert weighted.tolist() == [[2.0, 4.0], [4.0, 0.0]]


@pytest.mark.parametrize("name", ["rollout_log_prob", "entropy"])
def test_what_a_method_asks_for_must_be_finite(name):
    spoilt = torch.tensor([[0.0, math.inf], [0.0, math.nan]])
    value, weighted, _ = token_loss(METHOD, None, inputs(**{name: spoilt}), torch.zeros(1, dtype=torch.float64))
    # The last token is outside the mask.
    assert value.isnan().tolist() == weighted.isnan().tolist() == [[False, True], [False, False]]


RATIO = torch.tensor([[1.5, 0.5, 1.0]], dtype=torch.float64)
OLD = torch.full((1, 3), -2.0, dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0]], dtype=torch.float64)
MASK = torch.ones(1, 3, dtype=torch.bool)
TRACED = OLD + RATIO.log(), OLD, ADVANTAGES, MASK


def as_lists(trace):
    return {name: values.tolist()[0] for name, values in trace._asdict().items()}


def test_a_methods_by_hand():
    grpo = method_named("grpo")()
    found = as_lists(token_trace(grpo, apply(grpo, None, Inputs(*TRACED)), torch.tensor(0.5)))
    # Clipped above with A > 0; below with A > 0 it keeps its gradient; each times the factor.
    assert found["weight"] == pytest.approx([0, 0.25, 0.5])
    assert found["ratio"] == found["bounded"] == pytest.approx([1.5, 0.5, 1])
    assert found["low"] == [0.8] * 3 and found["high"] == [1.2] * 3 and found["advantage"] == [2, 2, -1]


@pytest.mark.parametrize("by_sequence", [False, True])
def test_an_observed_losss_by_hand(by_sequence):
    gradient = torch.tensor([[-0.6, 0.0, 0.1]], dtype=torch.float64)
    tokens, share = ObservedTokens(*TRACED, gradient), torch.full((1, 3), 0.2, dtype=torch.float64)
    found = as_lists(observed_token_trace(tokens, Bounds(0.9, 1.1), by_sequence, share))
    # F = -g / (share * A).
    assert found["weight"] == pytest.approx([1.5, 0, 0.5])
    mean = 0.75 ** (1 / 3)
    assert found["bounded"] == pytest.approx([mean] * 3 if by_sequence else [1.5, 0.5, 1])
    # Without an advantage there is no weight.
    tokens = ObservedTokens(*TRACED[:2], torch.zeros(1, 3), MASK, torch.ones(1, 3))
    assert as_lists(observed_token_trace(tokens, Bounds(0.8, 1.2), by_sequence, 1.0))["weight"] == [0, 0, 0]
