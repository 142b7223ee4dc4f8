"""Measures what any loss does to its tokens by its gradient on log_prob: sums over tokens, and metrics of these."""

from dataclasses import replace

import torch
from torch import Tensor, where

from verl_clipx.losses.applying.metrics import SUMS, make_metrics, name_sums, token_sums
from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.shared_metrics import (
    CLIP_FRACTION_HIGH,
    CLIP_FRACTION_LOW,
    GRADIENT_MASS,
    PPO_KL,
    TOKEN_METRICS,
)
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Inputs, Tokens, prepare_tokens

# The names of the sums that follow those of `token_sums`: three numbers of tokens, and the mass of the gradient where A
# is 0. There, F * A has no mass.
OBSERVED_SUMS = ("without gradient", "without gradient, r < 1", "without gradient, r > 1", "mass, A = 0")

WITHOUT_GRADIENT = "the same for tokens with a ratio below 1, and above 1; a token at a ratio of 1 is in neither"
IN_MIDDLE = (
    "sum of |g| over the tokens in M. Under `token-mean` this and the masses of the other regions have the unit of the "
    "table above: |F·A| divided by the number of all tokens"
)

# Metrics whose meaning for a gradient g differs from that for F * A, or that stand beside a number of verl's own.
OF_GRADIENT_ALONE = (
    replace(
        CLIP_FRACTION_LOW,
        name="clip_fraction",
        meaning="fraction of tokens with an advantage other than 0 and a g of exactly 0",
        sums=OBSERVED_SUMS[:1],
    ),
    replace(CLIP_FRACTION_LOW, meaning=WITHOUT_GRADIENT, sums=OBSERVED_SUMS[1:2]),
    replace(CLIP_FRACTION_HIGH, meaning=WITHOUT_GRADIENT, sums=OBSERVED_SUMS[2:3]),
    replace(
        PPO_KL,
        meaning="the same as `ppo_kl` above; verl logs its own `ppo_kl` too (a mean of micro-batch means; under "
        "`kl_cov` of absolute values)",
        logged_as="",
    ),
    replace(GRADIENT_MASS["M"], meaning=IN_MIDDLE, sums=(*GRADIENT_MASS["M"].sums, OBSERVED_SUMS[3])),
)

_REPLACED = {metric.name for metric in OF_GRADIENT_ALONE}

# Every metric of an observed loss: those above, and the shared metrics of other names.
OBSERVED_METRICS = OF_GRADIENT_ALONE + tuple(
    metric for metric in TOKEN_METRICS if not metric.logged_as and metric.name not in _REPLACED
)


def observed_sums(inputs: Inputs, gradient: Tensor, bounds: Bounds, by_sequence: bool) -> Tensor:
    """Return the sums over tokens from which `observed_metrics` makes the metrics.

    Args:
        inputs: the micro-batch.
        gradient: the gradient of the policy term with respect to log_prob, (sequences, length).
        bounds: the bounds on the ratio that separate the regions.
        by_sequence: whether the loss clips by the sequence's mean log-ratio.

    Returns:
        (len(SUMS) + len(OBSERVED_SUMS),), float64, additive over any split of the tokens: the sums of `token_sums` with
        -gradient in place of F * A; the numbers of tokens that have no gradient although A is not 0, which are all of
        them, those with a ratio below 1, and those with a ratio above 1; and the gradient's mass where A is 0.
    """
    t = prepare_tokens(inputs, LARGEST_LOG_RATIO)
    gradient = where(t.mask, gradient.to(t.ratio.dtype), 0.0)
    log_ratio = t.log_prob - t.old_log_prob
    if by_sequence:
        log_ratio = t.sequence_mean(log_ratio)
    is_clipped = t.mask & (t.advantages != 0) & (gradient == 0)
    # True also where A is NaN, so that the sum becomes NaN and shows it.
    has_no_sign = ~(t.advantages.abs() > 0)
    own_sums = [
        is_clipped.sum(dtype=torch.float64),
        (is_clipped & (log_ratio < 0)).sum(dtype=torch.float64),
        (is_clipped & (log_ratio > 0)).sum(dtype=torch.float64),
        where(has_no_sign, gradient.abs(), 0.0).sum(-1).sum(dtype=torch.float64),
    ]
    shared_sums = token_sums(
        t,
        bounded=compute_bounded(t, by_sequence),
        bounds=bounds,
        weighted=-gradient,
        dual_clip=None,
        counted=None,
    )
    return torch.cat([shared_sums, torch.stack(own_sums)])


def compute_bounded(t: Tokens, by_sequence: bool) -> Tensor:
    """Return what a loss's bounds act on: each token's ratio, or the exponential of its sequence's mean log-ratio.

    Args:
        t: the tokens.
        by_sequence: whether the loss clips by the sequence's mean log-ratio.

    Returns:
        (sequences, length), or (sequences, 1) if the loss clips by sequence.
    """
    if by_sequence:
        return t.sequence_mean(t.log_prob - t.old_log_prob).exp()
    return t.ratio


def observed_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Return the metrics over the tokens of a micro-batch, each times the number of tokens.

    Args:
        sums: from `observed_sums`.

    Returns:
        From metric key to a 0-d float64 tensor, as for `make_metrics`. No key is one of verl's own, whose metrics stay
        as verl computes them.
    """
    return make_metrics(name_sums(sums, (*SUMS, *OBSERVED_SUMS)), OBSERVED_METRICS)
