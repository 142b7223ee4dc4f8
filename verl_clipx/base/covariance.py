"""The covariance of a token's advantage and log-probability, about the means of all tokens (arXiv 2505.22617)."""

import torch
from torch import Tensor, stack, where

from verl_clipx.base.histogram import ratio_or_zero
from verl_clipx.base.tokens import Tokens, number_in, parts

SUMS = 3


def sums_for_means(t: Tokens) -> Tensor:
    """The number of tokens and the sums of their advantages and log-probabilities: (SUMS,), float64, additive."""
    # Of each part first: a compiler then reads the tokens once.
    of_parts = (parts(where(t.mask, values, 0.0).to(torch.float64)).sum(-1) for values in (t.advantages, t.log_prob))
    return stack([number_in(t.mask).to(torch.float64), *of_parts]).sum(-1)


def means_of(sums: Tensor) -> Tensor:
    """The mean advantage and the mean log-probability: (2,), float64; 0 without tokens."""
    return ratio_or_zero(sums[1:SUMS], sums[:1])


def covariances(t: Tokens, means: Tensor) -> Tensor:
    """(A - mean A) * (log p - mean log p) of each token, (sequences, length)."""
    mean_advantage, mean_log_prob = means.to(t.ratio.dtype).unbind()
    return (t.advantages - mean_advantage) * (t.log_prob - mean_log_prob)
