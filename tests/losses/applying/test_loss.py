"""The loss per token: value and gradient are what they are told to be. Not covered: formulas, shaping, which tokens
count (tests/losses/methods, tests/training/worker/test_golden.py), the metrics (test_metrics.py), traces
(tests/training/worker/test_tracer.py).
"""

import math

import pytest
import torch

from verl_clipx.losses.applying.loss import per_token_loss, summed_loss


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


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (torch.float16, 65504.0),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max),
        # As wide as the product, which is not clamped.
        (torch.float32, math.inf),
    ],
)
def test_the_overflow_of_a_product_is_finite_in_half_precision(dtype, largest):
    log_prob = torch.zeros(1, 3, dtype=dtype, requires_grad=True)
    weighted = torch.tensor([[1e30, -1e30, math.nan]])
    loss = per_token_loss(log_prob, torch.zeros(1, 3), weighted)
    # What a gradient scaler multiplies by takes the product beyond float32.
    loss.backward(torch.full((1, 3), 1e30))
    assert log_prob.grad[0, :2].tolist() == [-largest, largest] and log_prob.grad[0, 2].isnan()


def test_a_factor_that_is_infinite_gives_no_gradient_and_the_value_nan():
    log_prob = torch.zeros(1, 2, requires_grad=True)
    loss = summed_loss(log_prob, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor(math.inf))
    assert loss.isnan()
    loss.backward()
    assert log_prob.grad.tolist() == [[0.0, 0.0]]


def test_second_derivative_is_refused_rather_than_wrong():
    log_prob = torch.zeros(1, 1, requires_grad=True)
    loss = per_token_loss(log_prob, torch.zeros(1, 1), torch.ones(1, 1)).square().sum()
    (first,) = torch.autograd.grad(loss + loss, log_prob, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
