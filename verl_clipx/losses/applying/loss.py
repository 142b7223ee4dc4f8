"""Computes the loss's value, F * A and the metrics' sums from tokens: pure functions of tensors for `compiled.py`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, where
from torch.autograd.function import FunctionCtx, once_differentiable

from verl_clipx.losses.applying.metrics import token_sums
from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import OPTIONAL, Inputs, Tokens, prepare_tokens
from verl_clipx.losses.modifiers import Shaping


class Applied(NamedTuple):
    """A method applied to the tokens of a micro-batch; tensors are (sequences, length) unless said otherwise.

    Args:
        tokens: the tokens, with shaped advantages.
        statistics: the statistics of these tokens, float64, as `compute_statistics` returns them; None if the decision
            was given.
        decision: the vector from which the bounds follow, float64.
        bounds: the clip bounds on what `Method.bounded` returns.
        weight: the gradient weight F; values outside the mask have no meaning.
        value: what is logged as the loss, 0 outside the mask.
        weighted: minus the gradient of the loss with respect to log_prob, 0 outside the mask. It is F * A, unless
            `Method.gradient` returns something else.
    """

    tokens: Tokens
    statistics: Tensor | None
    decision: Tensor
    bounds: Bounds
    weight: Tensor
    value: Tensor
    weighted: Tensor


def apply(method: Method, shaping: Shaping | None, inputs: Inputs, decision: Tensor | None = None) -> Applied:
    """Apply a method to the tokens of a micro-batch. This is the one place where a loss is computed from its formulas.

    Args:
        method: the method.
        shaping: what changes the advantages first; None: they stay as they are.
        inputs: the micro-batch.
        decision: what the method decided; None: the method decides from the statistics of these tokens.

    Returns:
        The results in float32 or, for float64 inputs, in float64. If an input of a token inside the mask is not finite,
        the token's value and gradient are NaN, whatever the method does with the input. verl then skips the step.
    """
    t = make_shaped_tokens(method, shaping, inputs)
    statistics = None
    if decision is None:
        statistics = compute_statistics(method, t, inputs.counted)
        decision = method.decide(statistics)
    bounds = method.bounds(t, decision)
    weight = method.gradient_weight(t, bounds)
    value = where(t.mask, method.loss_value(t, bounds, weight), 0.0)
    weighted = where(t.mask, method.gradient(t, bounds, weight), 0.0)
    has_finite_inputs = find_finite_tokens(t)
    value = where(has_finite_inputs, value, math.nan)
    weighted = where(has_finite_inputs, weighted, math.nan)
    return Applied(
        tokens=t,
        statistics=statistics,
        decision=decision,
        bounds=bounds,
        weight=weight,
        value=value,
        weighted=weighted,
    )


class TokenLoss(NamedTuple):
    """The loss of each token before aggregation, as numbers without a gradient.

    Args:
        value, weighted: as for `Applied`.
        sums: the sums of the metrics, from `metrics.token_sums`.
    """

    value: Tensor
    weighted: Tensor
    sums: Tensor


def make_shaped_tokens(method: Method, shaping: Shaping | None, inputs: Inputs) -> Tokens:
    """Return the tokens of a micro-batch as `prepare_tokens` makes them, with shaped advantages.

    Args:
        method: the method, which knows where log-ratios are clamped.
        shaping: computes the advantages; None: they stay as they are.
        inputs: the micro-batch.
    """
    t = prepare_tokens(inputs, method.log_ratio_clamp)
    if shaping is None:
        return t
    return t._replace(advantages=shaping.advantages(t))


def compute_statistics(method: Method, t: Tokens, counted: Tensor | None, first: Tensor | None = None) -> Tensor:
    """Return the additive statistics of the tokens that count: those of the first stage, then those of the second.

    Args:
        method: the method that the statistics are for.
        t: the tokens of a micro-batch.
        counted: the tokens that count, bool, (sequences, length); None: all tokens in the mask count.
        first: the statistics of the first stage, summed over all tokens of the update, from which those of the second
            stage are computed; None: the first-stage statistics of these tokens.

    Returns:
        (statistics_size + second_statistics_size,), float64.
    """
    if counted is not None:
        t = t._replace(mask=t.mask & counted)
    first_stage = method.statistics(t)
    if not method.second_statistics_size:
        return first_stage
    if first is None:
        first = first_stage
    return torch.cat([first_stage, method.second_statistics(t, first)])


def token_statistics(method: Method, shaping: Shaping | None, inputs: Inputs, first: Tensor | None = None) -> Tensor:
    """Return the statistics of a micro-batch from which a method's bounds follow.

    Args:
        method, first: as for `compute_statistics`.
        shaping: what changes the advantages first; None: they stay as they are.
        inputs: the micro-batch.

    Returns:
        What `compute_statistics` returns.
    """
    t = make_shaped_tokens(method, shaping, inputs)
    return compute_statistics(method, t, inputs.counted, first)


def token_loss(method: Method, shaping: Shaping | None, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """Return a method's loss per token, and the sums of its metrics. The arguments are as for `apply`."""
    t, _, _, bounds, weight, value, weighted = apply(method, shaping, inputs, decision)
    # The sums do not need the weight, and while they are computed it would add to the loss's peak memory.
    del weight
    sums = token_sums(
        t,
        bounded=method.bounded(t),
        bounds=bounds,
        weighted=weighted,
        dual_clip=method.dual_clip,
        counted=inputs.counted,
    )
    return TokenLoss(value=value, weighted=weighted, sums=sums)


def find_finite_tokens(t: Tokens) -> Tensor:
    """Return which tokens have only finite inputs: bool, (sequences, length)."""
    # A sum is not finite if any of its terms is not.
    total = t.log_prob - t.old_log_prob + t.advantages
    for name in OPTIONAL:
        optional_values = getattr(t, name)
        if optional_values is not None and optional_values.is_floating_point():
            total = total + optional_values
    # A comparison, because a compiler takes arithmetic such as total * 0 for the constant 0, even if total is NaN.
    return total.abs() < math.inf


class _PrescribedLoss(torch.autograd.Function):
    """A loss with a given value, whose gradient with respect to log_prob is -weighted, or -weighted times a factor."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, log_prob: Tensor, loss: Tensor, weighted: Tensor, factor: Tensor | float | None
    ) -> Tensor:
        """Return the given loss.

        Args:
            ctx: keeps for `backward` what determines the gradient.
            log_prob: the only input with a gradient, (sequences, length).
            loss: the loss's value: (sequences, length), or 0-d for a sum over tokens.
            weighted: F * A, (sequences, length).
            factor: in a 0-d loss, the factor of every token (a number or 0-d) or of each sequence's tokens, (sequences,
                1). None: the loss is per token.
        """
        ctx.save_for_backward(weighted)
        ctx.log_prob_dtype = log_prob.dtype
        ctx.factor = factor
        # An autograd function must not return an input itself, so the loss is returned as a view or as a copy.
        if loss.ndim > 0:
            return loss.view_as(loss)
        # A copy, because verl subtracts the entropy's term from a scalar in place, which is forbidden in this view.
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient with respect to log_prob, and none for the other inputs of `forward`."""
        (weighted,) = ctx.saved_tensors
        factor = ctx.factor
        if isinstance(factor, Tensor):
            # A mean over no tokens has an infinite factor. As in verl, its gradient is 0 and its value NaN.
            factor = factor.nan_to_num(nan=math.nan, posinf=0.0)
        scale = grad_output if factor is None else factor * grad_output
        return compute_gradient(weighted, scale, ctx.log_prob_dtype), None, None, None


def compute_gradient(weighted: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient with respect to log_prob, -weighted * scale, in the dtype of log_prob.

    A finite input has to give a finite gradient in float16 and bfloat16 too. So a number beyond the range of a dtype
    narrower than the product's becomes the dtype's largest number of the same sign. An infinite product does too, since
    it may be the overflow of finite factors. NaN stays NaN, which marks the tokens because of which verl has to skip
    the step (see `apply`). A dtype as wide as the product's is not clamped.

    Args:
        weighted: F * A, (sequences, length), in the compute dtype.
        scale: the derivative of what is minimised with respect to the loss of each token; broadcasts to `weighted`.
        dtype: the dtype of log_prob.
    """
    gradient = weighted * -scale
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(gradient.dtype).max:
        gradient.clamp_(-largest, largest)
    return gradient.to(dtype)


def per_token_loss(log_prob: Tensor, value: Tensor, weighted: Tensor) -> Tensor:
    """Return a per-token loss with a prescribed value and a prescribed gradient.

    Nothing is differentiated through exp, clamp or where, so a branch that was not selected cannot spoil the gradient,
    and only one tensor is kept for the backward pass.

    Args:
        log_prob: log-probabilities under the current policy, (sequences, length); the only input with a gradient.
        value: the loss's value per token, (sequences, length), in the compute dtype.
        weighted: F * A, the gradient of the objective J per token, with the shape and dtype of `value`.

    Returns:
        `value`, (sequences, length), whose gradient with respect to `log_prob` is exactly -F * A times the incoming
        gradient. Differentiable once. A gradient beyond the range of float16 or bfloat16 becomes the largest number of
        that dtype: 65504 in float16.

    Source: DGPO, Eq. 1 (every method is a gradient weight on A times the gradient of log_prob).
    """
    return _PrescribedLoss.apply(log_prob, value, weighted, None)


def summed_loss(log_prob: Tensor, value: Tensor, weighted: Tensor, factor: Tensor | float) -> Tensor:
    """Return the sum of `per_token_loss` times a factor, computed in one pass forward and one backward.

    Args:
        log_prob, value, weighted: as for `per_token_loss`; value and weighted must be 0 outside the mask, because the
            sum runs over all positions.
        factor: what the aggregation multiplies each token's loss by, without a gradient: either one factor for all
            tokens (a number or a 0-d tensor), or one per sequence, (sequences, 1). An infinite factor, which a mean
            over no tokens has, gives the value NaN and the gradient 0.

    Returns:
        The loss, 0-d.
    """
    if isinstance(factor, Tensor) and factor.ndim > 0:
        total = (value.sum(-1, keepdim=True) * factor).sum()
    else:
        total = value.sum() * factor
    return _PrescribedLoss.apply(log_prob, total, weighted, factor)
