"""From tokens to the loss's value, F * A and the metrics' sums: pure functions of tensors, fused by `compiled.py`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, where
from torch.autograd.function import FunctionCtx, once_differentiable

from verl_clipx.losses.applying.metrics import token_sums
from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import OPTIONAL, Inputs, Tokens, tokens_of
from verl_clipx.losses.modifiers import Shaping


class Applied(NamedTuple):
    """A method applied to the tokens of a micro-batch; tensors are (sequences, length) unless said otherwise.

    Args:
        tokens: the tokens, with shaped advantages.
        statistics: the tokens' own, (statistics_size,), float64; None if the decision was given.
        decision: what the bounds follow from, float64.
        bounds: the clip bounds on `Method.bounded`.
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
    """Applies a method to the tokens of a micro-batch: the one place where a loss is computed from its formulas.

    Args:
        decision: what the method decided; None: it decides from the statistics of these tokens.

    Returns:
        In float32 or, for float64 inputs, in float64. If an input inside the mask is not finite, the token's value and
        gradient are NaN, whatever the method does with the input. verl then skips the step.
    """
    t = tokens_in(method, shaping, inputs)
    statistics = None
    if decision is None:
        statistics = statistics_of(method, t, inputs.counted)
        decision = method.decide(statistics)
    bounds = method.bounds(t, decision)
    weight = method.gradient_weight(t, bounds)
    value = where(t.mask, method.loss_value(t, bounds, weight), 0.0)
    weighted = where(t.mask, method.gradient(t, bounds, weight), 0.0)
    has_finite_inputs = finite(t)
    value = where(has_finite_inputs, value, math.nan)
    weighted = where(has_finite_inputs, weighted, math.nan)
    return Applied(
        tokens=t, statistics=statistics, decision=decision, bounds=bounds, weight=weight, value=value, weighted=weighted
    )


class TokenLoss(NamedTuple):
    """The loss of each token before aggregation, as plain numbers.

    Args:
        value, weighted: as for `Applied`.
        sums: from `metrics.token_sums`.
    """

    value: Tensor
    weighted: Tensor
    sums: Tensor


def tokens_in(method: Method, shaping: Shaping | None, inputs: Inputs) -> Tokens:
    """The tokens of a micro-batch, with shaped advantages."""
    t = tokens_of(inputs, method.log_ratio_clamp)
    if shaping is None:
        return t
    return t._replace(advantages=shaping.advantages(t))


def statistics_of(method: Method, t: Tokens, counted: Tensor | None, first: Tensor | None = None) -> Tensor:
    """The additive statistics of the tokens that count, those of both stages, float64.

    Args:
        counted: the tokens that count; None: all in the mask do.
        first: the sum of the first stage over all tokens, which the second is about; None: that of these tokens.
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
    """The additive statistics behind a method's bounds, as `statistics_of`."""
    return statistics_of(method, tokens_in(method, shaping, inputs), inputs.counted, first)


def token_loss(method: Method, shaping: Shaping | None, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """A method's loss per token, as `apply` computes it, with the sums of its metrics (`metrics.token_sums`)."""
    t, _, _, bounds, weight, value, weighted = apply(method, shaping, inputs, decision)
    # The sums do not need it, and it would be a part of the loss's largest memory.
    del weight
    sums = token_sums(t, method.bounded(t), bounds, weighted, method.dual_clip, inputs.counted)
    return TokenLoss(value=value, weighted=weighted, sums=sums)


def finite(t: Tokens) -> Tensor:
    """Returns the tokens that have only finite inputs: bool, (sequences, length)."""
    total = t.log_prob - t.old_log_prob + t.advantages
    for name in OPTIONAL:
        asked_for = getattr(t, name)
        if asked_for is not None and asked_for.is_floating_point():
            total = total + asked_for
    # A comparison, because a compiler takes arithmetic such as total * 0 for the constant 0, even if total is NaN.
    return total.abs() < math.inf


class _Prescribed(torch.autograd.Function):
    """A loss whose value is given, and whose gradient with respect to log_prob is -weighted times a weight."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, log_prob: Tensor, loss: Tensor, weighted: Tensor, weight: Tensor | float | None
    ) -> Tensor:
        """Return the given loss.

        Args:
            ctx: keeps for `backward` what determines the gradient.
            log_prob: the only input with a gradient, (sequences, length).
            loss: the loss's value, per token or 0-d.
            weighted: F * A, (sequences, length).
            weight: the factor of each token in a 0-d loss; None: the loss is per token.
        """
        ctx.save_for_backward(weighted)
        ctx.log_prob_dtype = log_prob.dtype
        ctx.weight = weight
        # verl subtracts the entropy's term from a scalar in place, which is forbidden in a view.
        return loss.view_as(loss) if loss.ndim else loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient with respect to log_prob, and none for the other inputs of `forward`."""
        (weighted,) = ctx.saved_tensors
        weight = ctx.weight
        if isinstance(weight, Tensor):
            # A mean over no tokens has an infinite weight. As in verl, its gradient is 0 and its value NaN.
            weight = weight.nan_to_num(nan=math.nan, posinf=0.0)
        scale = grad_output if weight is None else weight * grad_output
        return minus_product(weighted, scale, ctx.log_prob_dtype), None, None, None


def minus_product(weighted: Tensor, grad_output: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns -weighted * grad_output in a dtype; finite numbers that the dtype cannot hold become its largest one."""
    gradient = weighted * -grad_output
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(gradient.dtype).max:
        gradient.clamp_(-largest, largest)
    return gradient.to(dtype)


def per_token_loss(log_prob: Tensor, value: Tensor, weighted: Tensor) -> Tensor:
    """A per-token loss with a prescribed value and a prescribed gradient.

    Nothing is differentiated through exp, clamp or where, so a branch that was not selected cannot spoil the
    gradient, and only one tensor is kept for the backward pass. A finite gradient that log_prob's dtype cannot hold
    becomes its largest finite number: in float16 that is 65504.

    Args:
        log_prob: log-probabilities under the current policy, (sequences, length); the only input with a gradient.
        value: the loss's value per token, (sequences, length), in the compute dtype.
        weighted: F * A, the gradient of the objective J per token, like `value`.

    Returns:
        `value`, (sequences, length), whose gradient with respect to `log_prob` is exactly -F * A times the incoming
        gradient. Differentiable once.

    Source: DGPO, Eq. 1 (every method is a gradient weight on A times the gradient of log_prob).
    """
    return _Prescribed.apply(log_prob, value, weighted, None)


def summed_loss(log_prob: Tensor, value: Tensor, weighted: Tensor, weight: Tensor | float) -> Tensor:
    """The weighted sum of `per_token_loss`, computed in one pass forward and one backward.

    Args:
        log_prob, value, weighted: as for `per_token_loss`.
        weight: one weight for all tokens, a number or 0-d; or one for the tokens of each sequence, (sequences, 1).

    Returns:
        0-d.
    """
    if isinstance(weight, Tensor) and weight.ndim > 0:
        total = (value.sum(-1, keepdim=True) * weight).sum()
    else:
        total = value.sum() * weight
    return _Prescribed.apply(log_prob, total, weighted, weight)
