"""A micro-batch's tokens: the inputs as verl passes them, and the tokens as methods see them, with finite ratios."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, where

# With the log-ratio inside +-SATURATION * log(largest finite number), the ratio, its square and the products of both
# with ordinary advantages neither overflow nor underflow to subnormal numbers.
SATURATION = 0.48

# verl clamps log-ratios to plus or minus this, and the plugin's losses do by default.
LARGEST_LOG_RATIO = 20.0

# The number of neighbouring tokens that one block of an accelerator's threads sums.
PART = 1024


class Inputs(NamedTuple):
    """The data of a micro-batch's tokens that verl and its worker have, padded.

    Args:
        log_prob, old_log_prob, advantages: (sequences, length).
        mask: the response's tokens, bool, (sequences, length); values outside are never used, not even NaN.
        counted: the tokens that statistics and metrics count, bool, (sequences, length); None: the tokens in the mask.
        rollout_log_prob, entropy: (sequences, length); None unless something asks for them.
        group: int64, (sequences,); None unless something asks for it.
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
        log_ratio, ratio: of the current to the old policy, (sequences, length). The log-ratio is clamped to
            +-log_ratio_clamp, and the ratio to the exponentials of that.
        free_ratio: the ratio without that clamp, (sequences, length), saturated as by `saturate`.
        unclamped: the tokens on which the clamp did not act, so that their clamped ratio passes a gradient: bool,
            (sequences, length).
        rollout_log_prob: log-probabilities under the policy that sampled, (sequences, length); None unless the method
            asks for them.
        entropy: the current policy's, in nats, (sequences, length); None unless the method asks for it.
        group: int64, (sequences,): equal numbers for the responses to one prompt, which may be split over micro-batches
            and ranks; None unless the method asks for it.
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
        """The probabilities p under the current policy and q under the old one, each (sequences, length)."""
        # Clamped, because the exponential of a wrong log-probability, which is above 0, may overflow.
        p = self.log_prob.exp().clamp(max=1.0)
        q = self.old_log_prob.exp().clamp(max=1.0)
        return p, q

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean over each sequence's tokens, (sequences, 1); 0 for a sequence without tokens."""
        return mean_over_sequence(values, self.mask)


# The fields that a method may ask for besides log-probabilities and advantages.
OPTIONAL = ("rollout_log_prob", "entropy", "group")


def mean_over_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each sequence's values in a mask, (sequences, 1); 0 for a sequence without tokens.

    Args:
        values: (sequences, length); values outside the mask may be anything, even NaN.
        mask: bool, (sequences, length).
    """
    total = where(mask, values, 0.0).sum(-1, keepdim=True)
    count = mask.sum(-1, keepdim=True)
    return total / count.clamp(min=1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses are computed in: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def parts(values: Tensor) -> Tensor:
    """Reshape tokens so that a sum over the last dimension is one block of threads' work.

    On an accelerator, a sequence is divided into parts of PART tokens. The number of blocks then follows from the
    number of tokens, and not from how these are divided into sequences.

    Args:
        values: (sequences, length).

    Returns:
        (sequences * length / PART, PART); on a CPU, or where the length is not known to be a multiple of PART, the
        values as they are.
    """
    if values.device.type == "cpu":
        return values
    # Imported here, because it imports sympy, which takes longer than all other imports together.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # Asked of the symbols that a graph is compiled for. If the numbers of one batch were asked, the compiler would make
    # another graph for each batch whose length happens to be a multiple.
    if statically_known_true(values.shape[-1] % PART == 0):
        return values.reshape(-1, PART)
    return values


def number_in(members: Tensor) -> Tensor:
    """Return the number of members in each row of `parts`.

    Args:
        members: bool, (sequences, length).

    Returns:
        (rows,), float32, where the rows are those into which `parts` reshapes the sequences.
    """
    if members.device.type == "cpu":
        return members.sum(-1, dtype=torch.float32)
    # Numbers instead of the mask itself, which the compiler would store and add up by a launch of its own.
    return parts(where(members, 1.0, 0.0)).sum(-1)


def saturate(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio, or a sum or mean of them, so that its exponential and the square of that are in range.

    They neither overflow nor underflow. The limits are about +-42.6 in float32 and +-340.7 in float64.
    """
    limit = SATURATION * math.log(torch.finfo(log_ratio.dtype).max)
    return log_ratio.clamp(-limit, limit)


def prepare_tokens(inputs: Inputs, log_ratio_clamp: float | None) -> Tokens:
    """Return the tokens that a loss and its statistics are computed from.

    Args:
        inputs: the micro-batch, in any float dtype; `counted` is ignored.
        log_ratio_clamp: the log-ratio is clamped to +-this (verl uses 20). None: it is only saturated, as by
            `saturate`.
    """
    dtype = compute_dtype(inputs.log_prob.dtype)
    mask = inputs.mask

    def keep_inside(values: Tensor | None) -> Tensor | None:
        """Return the values detached and in the loss's dtype, and 0 outside the mask; None for None."""
        if values is None:
            return None
        return where(mask, values.detach().to(dtype), 0.0)

    log_prob = keep_inside(inputs.log_prob)
    old_log_prob = keep_inside(inputs.old_log_prob)
    advantages = keep_inside(inputs.advantages)
    rollout_log_prob = keep_inside(inputs.rollout_log_prob)
    entropy = keep_inside(inputs.entropy)
    free_log_ratio = saturate(log_prob - old_log_prob)
    free_ratio = free_log_ratio.exp()
    log_ratio = free_log_ratio
    ratio = free_ratio
    if log_ratio_clamp is not None:
        log_ratio = free_log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
        # Clamped instead of computed from log_ratio, so that free_ratio and ratio take a single exponential.
        ratio = free_ratio.clamp(math.exp(-log_ratio_clamp), math.exp(log_ratio_clamp))
    return Tokens(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        mask=mask,
        log_ratio=log_ratio,
        ratio=ratio,
        free_ratio=free_ratio,
        unclamped=log_ratio == free_log_ratio,
        rollout_log_prob=rollout_log_prob,
        entropy=entropy,
        group=inputs.group,
    )
