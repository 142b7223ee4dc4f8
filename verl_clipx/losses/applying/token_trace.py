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
    """Return what a method does to each token.

    Args:
        method: the method.
        applied: the method applied to the tokens.
        factor: what verl's rollout correction and entropy selection multiply F by, broadcastable to (sequences,
            length).
    """
    bounded = method.bounded(applied.tokens)
    return _make_trace(applied.tokens, bounded, applied.bounds, applied.weight * factor)


def observed_token_trace(
    inputs: Inputs, gradient: Tensor, bounds: Bounds, by_sequence: bool, share: Tensor | float
) -> TokenTrace:
    """Return what any loss does to each token: F = -gradient / (share * advantage), and 0 where the advantage is 0.

    Args:
        inputs, gradient, bounds, by_sequence: as for `observed.observed_sums`.
        share: what each token's loss is multiplied by in the scalar loss, broadcastable to (sequences, length).
    """
    t = prepare_tokens(inputs, LARGEST_LOG_RATIO)
    weighted = -gradient.to(t.ratio.dtype) / share
    weight = where(t.advantages != 0, weighted / t.advantages, 0.0)
    return _make_trace(t, compute_bounded(t, by_sequence), bounds, weight)


def _make_trace(t: Tokens, bounded: Tensor, bounds: Bounds, weight: Tensor) -> TokenTrace:
    """Return a trace in which each number has one value per token.

    Args:
        t: the tokens.
        bounded: what the bounds act on, broadcastable to (sequences, length), like all that follow.
        bounds: the bounds.
        weight: the gradient weight F.
    """
    # Added to a number, or to one value per sequence, it makes one value per token.
    zeros = torch.zeros_like(t.ratio)
    return TokenTrace(
        log_prob=t.log_prob,
        old_log_prob=t.old_log_prob,
        ratio=t.ratio,
        advantage=t.advantages,
        bounded=zeros + bounded,
        low=zeros + bounds.low,
        high=zeros + bounds.high,
        weight=zeros + weight,
    )
