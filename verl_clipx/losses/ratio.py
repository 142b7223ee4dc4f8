"""The importance-sampling ratio between the current and the old policy, kept finite."""

import math

import torch
from torch import Tensor

from verl_clipx.masking import kept, less, spread

# With the log-ratio inside +-SATURATION * log(largest finite number) the ratio, its square and the products of both
# with ordinary advantages neither overflow nor underflow to subnormal numbers.
SATURATION = 0.48

# exp() rounds, so a log-ratio exactly on the clamp may give a ratio some rounding steps beyond exp(clamp). Eight steps
# are still less than the distance to the next float32 log-ratio beyond 20.
CLAMP_SLACK_STEPS = 8


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that losses are computed in: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def saturation_limit(dtype: torch.dtype) -> float:
    """The largest magnitude of a log-ratio in `dtype`: about 42.6 in float32 and 340.7 in float64."""
    return SATURATION * math.log(torch.finfo(dtype).max)


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor, log_ratio_clamp: float | None) -> tuple[Tensor, Tensor]:
    """Log-ratio and ratio of the current policy to the old one; no gradient flows through either.

    Args:
        log_prob: log-probability of each token under the current policy, (sequences, length), any float dtype.
        old_log_prob: the same under the old policy.
        log_ratio_clamp: the log-ratio is clamped to +-this (verl uses 20); None clamps only where the ratio or its
            square would overflow (see `saturation_limit`).

    Returns:
        log_ratio, ratio: (sequences, length), in `compute_dtype(log_prob.dtype)`, finite for finite input.
    """
    dtype = compute_dtype(log_prob.dtype)
    limit = saturation_limit(dtype)
    if log_ratio_clamp is not None:
        limit = min(limit, log_ratio_clamp)
    log_ratio = (log_prob.detach().to(dtype) - old_log_prob.detach().to(dtype)).clamp_(-limit, limit)
    return log_ratio, log_ratio.exp()


def clamped(log_ratio: Tensor, ratio: Tensor, log_ratio_clamp: float) -> tuple[Tensor, Tensor]:
    """A free log-ratio and its ratio, both with the log-ratio within +-log_ratio_clamp: without a second exp."""
    ratio = ratio.clamp(math.exp(-log_ratio_clamp), math.exp(log_ratio_clamp))
    return log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp), ratio


def beyond_clamp(ratio: Tensor, log_ratio_clamp: float | None) -> Tensor | None:
    """The tokens whose log-ratio is beyond the clamp; one exactly on it is not.

    Args:
        ratio: (sequences, length), saturated but not clamped to `log_ratio_clamp`.
        log_ratio_clamp: None for no clamp.

    Returns:
        Signs as from `less`, (sequences, length); None where there is no clamp, or one wider than the ratio's own
        saturation.
    """
    if log_ratio_clamp is None or log_ratio_clamp >= saturation_limit(ratio.dtype):
        return None
    slack = CLAMP_SLACK_STEPS * torch.finfo(ratio.dtype).eps
    smallest = math.exp(-log_ratio_clamp) * (1 - slack)
    largest = math.exp(log_ratio_clamp) * (1 + slack)
    return less(ratio, smallest).bitwise_or_(less(largest, ratio))


def followed_ratio(ratio: Tensor, log_ratio_clamp: float | None) -> Tensor:
    """The derivative of the clamped ratio with respect to log_prob: the ratio, or 0 beyond the clamp.

    verl clamps the log-ratio with torch.clamp, which passes a gradient at the clamp itself and none beyond it.

    Args:
        ratio, log_ratio_clamp: as for `beyond_clamp`.

    Returns:
        (sequences, length), in the ratio's dtype.
    """
    beyond = beyond_clamp(ratio, log_ratio_clamp)
    return ratio if beyond is None else kept(ratio, spread(beyond.bitwise_not_()))
