"""The inputs that verl passes of a micro-batch, and its tokens as methods see them, with finite ratios."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, where

# With the log-ratio inside +-SATURATION * log(largest finite number) the ratio, its square and the products of both
# with ordinary advantages neither overflow nor underflow to subnormal numbers.
SATURATION = 0.48

# verl clamps log-ratios to plus or minus this, and the plugin's losses do by default.
LARGEST_LOG_RATIO = 20.0

# Tokens of a sequence that an accelerator adds up by one block of threads.
PART = 1024


class Inputs(NamedTuple):
    """The data of a micro-batch's tokens that verl and its worker have, padded.

    Args:
        log_prob, old_log_prob, advantages: (sequences, length).
        mask: bool, (sequences, length); values outside are never used, not even NaN.
        counted: bool, (sequences, length): the tokens that statistics and metrics count; None: the tokens in the mask.
        rollout_log_prob, entropy: (sequences, length); group: int64, (sequences,); None unless something asks for them.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    counted: Tensor | None = None
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None


class Tokens(NamedTuple):
    """A micro-batch's tokens: detached, 0 outside the mask, in float32, or in float64 for float64 inputs.

    Args:
        log_prob, old_log_prob: log-probabilities under the current and the old policy, (sequences, length).
        advantages: (sequences, length), after shaping.
        mask: bool, (sequences, length): the response's tokens; for statistics, those that count.
        log_ratio, ratio: of the current to the old policy, the log-ratio clamped to +-log_ratio_clamp.
        free_ratio: the ratio without that clamp, within the range of the dtype.
        unclamped: bool, (sequences, length): where the clamp did not act, so that the clamped ratio passes a gradient.
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
    unclamped: Tensor
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None

    @property
    def probabilities(self) -> tuple[Tensor, Tensor]:
        """p and q, those under the current and the old policy, (sequences, length)."""
        # Log-probabilities that are none would overflow.
        return self.log_prob.exp().clamp(max=1.0), self.old_log_prob.exp().clamp(max=1.0)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence's tokens, (sequences, 1); 0 for a sequence without tokens."""
        return mean_over_sequence(values, self.mask)


# The fields that a method may ask for besides log-probabilities and advantages.
OPTIONAL = ("rollout_log_prob", "entropy", "group")


def mean_over_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over each sequence's tokens in a mask, (sequences, 1); 0 for a sequence without tokens."""
    return where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that losses are computed in: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def parts(values: Tensor) -> Tensor:
    """Returns what one block of threads adds up: sequences or, on an accelerator that divides them evenly, parts.

    The grid of threads then follows from the number of tokens, however they are divided into sequences: (sequences,
    length) becomes (sequences * length / PART, PART).
    """
    if values.device.type == "cpu":
        return values
    # Here, since it imports sympy, which takes longer than all else.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # Asked of the graph and not of the numbers: it would be another one where they happen to be whole.
    return values.reshape(-1, PART) if statically_known_true(values.shape[-1] % PART == 0) else values


def number_in(members: Tensor) -> Tensor:
    """The number of members in each of `parts`, float32: `members` is bool, (sequences, length)."""
    if members.device.type == "cpu":
        return members.sum(-1, dtype=torch.float32)
    # Numbers instead of a mask, which would be stored and added up by a launch of its own.
    return parts(where(members, 1.0, 0.0)).sum(-1)


def saturate(log_ratio: Tensor) -> Tensor:
    """A log-ratio, or a sum or mean of them, within its dtype's limits: about +-42.6 in float32, +-340.7 in float64."""
    limit = SATURATION * math.log(torch.finfo(log_ratio.dtype).max)
    return log_ratio.clamp(-limit, limit)


def tokens_of(inputs: Inputs, log_ratio_clamp: float | None) -> Tokens:
    """Returns the tokens that a loss and its statistics are computed from.

    Args:
        inputs: the micro-batch, in any float dtype; `counted` is ignored.
        log_ratio_clamp: the log-ratio is clamped to +-this (verl uses 20); None: it is clamped only where the ratio or
            its square would overflow.
    """
    dtype = compute_dtype(inputs.log_prob.dtype)
    mask = inputs.mask

    def inside(values: Tensor | None) -> Tensor | None:
        return None if values is None else where(mask, values.detach().to(dtype), 0.0)

    current, old, advantages = map(inside, (inputs.log_prob, inputs.old_log_prob, inputs.advantages))
    optional = inside(inputs.rollout_log_prob), inside(inputs.entropy), inputs.group
    free = saturate(current - old)
    free_ratio = free.exp()
    log_ratio = free
    ratio = free_ratio
    if log_ratio_clamp is not None:
        log_ratio = free.clamp(-log_ratio_clamp, log_ratio_clamp)
        ratio = free_ratio.clamp(math.exp(-log_ratio_clamp), math.exp(log_ratio_clamp))
    return Tokens(current, old, advantages, mask, log_ratio, ratio, free_ratio, log_ratio == free, *optional)
