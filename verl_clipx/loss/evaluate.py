"""Runs a method on your own tensors, for inspection."""

from typing import NamedTuple

from torch import Tensor

from verl_clipx.base.method import Bounds, Method
from verl_clipx.base.tokens import Inputs, Tokens
from verl_clipx.loss.loss import apply, per_token_loss
from verl_clipx.modifiers import AdvantageReweighting


class Evaluated(NamedTuple):
    """A method's loss per token, with everything that it was computed from.

    Args:
        loss: (sequences, length), differentiable with respect to log_prob.
        weight: the gradient weight F, (sequences, length).
        bounds: the clip bounds.
        tokens: the tokens that loss, weight and bounds were computed from.
        statistics: the statistics behind the bounds, (statistics_size,), float64.
    """

    loss: Tensor
    weight: Tensor
    bounds: Bounds
    tokens: Tokens
    statistics: Tensor


def evaluate(
    method: Method,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    statistics: Tensor | None = None,
    shaping: AdvantageReweighting | None = None,
    **optional: Tensor | None,
) -> Evaluated:
    """A method's loss per token for inspection: uncompiled, and with everything that it was computed from.

    Args:
        method: a method with its parameters, for example `METHODS["acpo"](alpha=2.0)`.
        log_prob: log-probabilities under the current policy, (sequences, length); the loss is differentiable with
            respect to them.
        old_log_prob, advantages, mask: (sequences, length).
        statistics: the statistics behind the bounds; None: those of these tokens.
        **optional: the other fields of `Inputs`.
    """
    inputs = Inputs(log_prob, old_log_prob, advantages, mask, **optional)
    applied = apply(method, shaping, inputs, None if statistics is None else method.decide(statistics))
    loss = per_token_loss(log_prob, applied.value, applied.weighted)
    given = applied.statistics if statistics is None else statistics
    return Evaluated(loss, applied.weight, applied.bounds, applied.tokens, given)
