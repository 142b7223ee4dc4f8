"""The one autograd function: value and gradient are exactly what they are told to be.

Does not cover any method, nor distributed training.
"""

import pytest
import torch

from verl_clipx.losses.policy_gradient import per_token_loss


def test_value_and_gradient_are_independent_of_each_other():
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    value = torch.tensor([[10.0, 20.0, 30.0]])
    weight_times_advantage = torch.tensor([[0.5, 0.0, -2.0]])
    loss = per_token_loss(log_prob, value, weight_times_advantage)
    assert torch.equal(loss, value)
    (loss * torch.tensor([[1.0, 5.0, 3.0]])).sum().backward()
    assert log_prob.grad.tolist() == [[-0.5, 0.0, 6.0]]


def test_no_gradient_reaches_the_value_or_the_weight():
    log_prob, value, weight = (torch.ones(1, 2, requires_grad=True) for _ in range(3))
    per_token_loss(log_prob, value, weight).sum().backward()
    assert value.grad is None
    assert weight.grad is None
    assert log_prob.grad.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradient_has_the_dtype_of_log_prob(dtype):
    log_prob = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    per_token_loss(log_prob, torch.zeros(1, 1), torch.tensor([[0.375]])).sum().backward()
    assert log_prob.grad.dtype == dtype
    assert log_prob.grad.item() == -0.375


def test_gradient_beyond_float16_becomes_its_largest_number():
    log_prob = torch.zeros(1, 2, dtype=torch.float16, requires_grad=True)
    per_token_loss(log_prob, torch.zeros(1, 2), torch.tensor([[1e6, 1e4]])).sum().backward()
    assert log_prob.grad.tolist() == [[-65504.0, -1e4]]


def test_second_derivative_is_refused_rather_than_wrong():
    log_prob = torch.zeros(1, 1, requires_grad=True)
    loss = per_token_loss(log_prob, torch.zeros(1, 1), torch.ones(1, 1)).square().sum()
    (gradient,) = torch.autograd.grad(loss + loss, log_prob, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
