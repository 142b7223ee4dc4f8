"""What a method sees of a micro-batch: its tokens, and their importance-sampling ratio, kept finite."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, where

# With the log-ratio inside +-SATURATION * log(largest finite number) the ratio, its square and the products of both
# with ordinary advantages neither overflow nor underflow to subnormal numbers.
SATURATION = 0.48


class Tokens(NamedTuple):
    """A micro-batch's tokens: detached, 0 outside the mask, float32 or, for float64 inputs, float64.

    Args:
        log_prob, old_log_prob: log-probabilities under the current and the old policy, (sequences, length).
        advantages: (sequences, length), after shaping.
        mask: bool, (sequences, length): the response's tokens; for statistics, those that count.
        log_ratio, ratio: of the current to the old policy, the log-ratio clamped to +-log_ratio_clamp.
        free_ratio: the ratio without that clamp, within the range of the dtype.
        live: bool: the clamp did not act, so that the clamped ratio passes a gradient.
        rollout_log_prob: under the policy that sampled; only for a method that asks for it.
        entropy: of the current policy in nats; only for a method that asks for it.
        group: int64, (sequences,): equal numbers for the responses to one prompt, which may be split over micro-batches
            and ranks; only for a method that asks for it.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor
    ratio: Tensor
    free_ratio: Tensor
    live: Tensor
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence's tokens, (sequences, 1); 0 for a sequence without tokens."""
        count = self.mask.sum(-1, keepdim=True).clamp(min=1)
        return where(self.mask, values, 0.0).sum(-1, keepdim=True) / count


# What a method may ask for besides log-probabilities and advantages.
OPTIONAL = ("rollout_log_prob", "entropy", "group")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that losses are computed in: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def saturation_limit(dtype: torch.dtype) -> float:
    """The largest magnitude of a log-ratio in `dtype`: about 42.6 in float32 and 340.7 in float64."""
    return SATURATION * math.log(torch.finfo(dtype).max)


def tokens_of(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    log_ratio_clamp: float | None,
    rollout_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    group: Tensor | None = None,
) -> Tokens:
    """What a loss and its statistics are computed from.

    Args:
        log_prob, old_log_prob, advantages: (sequences, length), any float dtype.
        mask: bool, (sequences, length); values outside are never used, not even NaN.
        log_ratio_clamp: the log-ratio is clamped to +-this (verl uses 20); None: only where the ratio or its square
            would overflow.
        rollout_log_prob, entropy: (sequences, length), or None.
        group: int64, (sequences,), or None.
    """
    dtype = compute_dtype(log_prob.dtype)

    def inside(values: Tensor | None) -> Tensor | None:
        return None if values is None else where(mask, values.detach().to(dtype), 0.0)

    current, old = inside(log_prob), inside(old_log_prob)
    limit = saturation_limit(dtype)
    free = (current - old).clamp(-limit, limit)
    free_ratio = free.exp()
    log_ratio, ratio = free, free_ratio
    if log_ratio_clamp is not None:
        log_ratio = free.clamp(-log_ratio_clamp, log_ratio_clamp)
        ratio = free_ratio.clamp(math.exp(-log_ratio_clamp), math.exp(log_ratio_clamp))
    return Tokens(
        current,
        old,
        inside(advantages),
        mask,
        log_ratio,
        ratio,
        free_ratio,
        log_ratio == free,
        inside(rollout_log_prob),
        inside(entropy),
        group,
    )
