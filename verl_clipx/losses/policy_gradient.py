"""The one place where a gradient weight becomes a differentiable loss."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _PerTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, log_prob: Tensor, value: Tensor, gradient_weight_times_advantage: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_weight_times_advantage)
        ctx.log_prob_dtype = log_prob.dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient_weight_times_advantage,) = ctx.saved_tensors
        gradient = (gradient_weight_times_advantage * grad_output).neg_()
        largest = torch.finfo(ctx.log_prob_dtype).max
        if largest < torch.finfo(gradient.dtype).max:
            gradient = gradient.clamp(-largest, largest)
        return gradient.to(ctx.log_prob_dtype), None, None


def per_token_loss(log_prob: Tensor, value: Tensor, gradient_weight_times_advantage: Tensor) -> Tensor:
    """A per-token loss with a prescribed value and a prescribed gradient.

    Nothing is differentiated through exp, clamp or where, so a branch that was not selected cannot spoil the
    gradient, and only one tensor is kept for the backward pass. A gradient that log_prob's dtype cannot hold becomes
    its largest finite number: in float16 that is 65504.

    Args:
        log_prob: log-probabilities under the current policy, (sequences, length); the only input with a gradient.
        value: the loss's value per token, (sequences, length), in the compute dtype.
        gradient_weight_times_advantage: F * A, the gradient of the objective J per token, like `value`.

    Returns:
        `value`, (sequences, length), whose gradient with respect to `log_prob` is exactly
        -gradient_weight_times_advantage times the incoming gradient. Differentiable once.

    Source: DGPO, Eq. 1 (every method is a gradient weight on A times the gradient of log_prob).
    """
    return _PerTokenLoss.apply(log_prob, value, gradient_weight_times_advantage)
