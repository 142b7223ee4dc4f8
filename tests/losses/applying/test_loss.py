"""The loss per token: value and gradient are what they are told to be. Not covered: formulas, shaping, which tokens
count (tests/losses/methods, tests/training/worker/test_golden.py), the metrics (test_metrics.py), traces
(tests/training/worker/test_tracer.py).
"""

import math

import pytest
import torch

from verl_clipx.losses.applying.loss import per_token_loss


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
