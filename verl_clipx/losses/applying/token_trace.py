"""Traces what a loss does to each token, by pure functions of tensors."""

from typing import NamedTuple

import torch
from torch import Tensor, where

from verl_clipx.losses.applying.loss import Applied
from verl_clipx.losses.applying.observed import compute_bounded
from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Inputs, Tokens, prepare_tokens


class TokenTrace(NamedTuple):
    """The traced numbers of tokens. Each is (sequences, length); values outside the mask have no meaning.

    Args:
        log_prob, old_log_prob: log-probabilities under the current and the old policy, in nats.
        ratio: current / old probability.
        advantage: the advantage after shaping.
        bounded: the values that the bounds act on.
        low, high: the bounds.
        weight: the gradient weight F; the gradient of the objective is F * advantage.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    ratio: Tensor
    advantage: Tensor
    bounded: Tensor
    low: Tensor
    high: Tensor
    weight: Tensor


def token_trace(method: Method, applied: Applied, factor: Tensor | float) -> TokenTrace:
    """Traces what a method does to each token.

    Args:
        factor: of verl's rollout correction and of entropy selection on F, broadcastable to (sequences, length).
    """
    bounded = method.bounded(applied.tokens)
    return _trace(applied.tokens, bounded, applied.bounds, applied.weight * factor)


def observed_token_trace(
    inputs: Inputs, gradient: Tensor, bounds: Bounds, by_sequence: bool, share: Tensor | float
) -> TokenTrace:
    """Traces what any loss does to each token: F = -gradient / (share * advantage), and 0 where the advantage is 0.

    Args:
        inputs, gradient, bounds, by_sequence: as for `observed.observed_sums`.
        share: the factor of each token's loss in the scalar loss, broadcastable to (sequences, length).
    """
    t = prepare_tokens(inputs, LARGEST_LOG_RATIO)
    weighted = -gradient.to(t.ratio.dtype) / share
    weight = where(t.advantages != 0, weighted / t.advantages, 0.0)
    return _trace(t, compute_bounded(t, by_sequence), bounds, weight)


def _trace(t: Tokens, bounded: Tensor, bounds: Bounds, weight: Tensor) -> TokenTrace:
    """Returns the trace of these numbers, each with one value per token."""
    # Bounds may be numbers, and values for whole sequences are (sequences, 1).
    for_each_token = torch.zeros_like(t.ratio)
    return TokenTrace(
        log_prob=t.log_prob,
        old_log_prob=t.old_log_prob,
        ratio=t.ratio,
        advantage=t.advantages,
        bounded=for_each_token + bounded,
        low=for_each_token + bounds.low,
        high=for_each_token + bounds.high,
        weight=for_each_token + weight,
    )
