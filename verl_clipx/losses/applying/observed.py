"""Measures what any loss does to its tokens by its gradient on log_prob: sums over tokens, and metrics of these."""

from dataclasses import replace

import torch
from torch import Tensor, where

from verl_clipx.losses.applying.metrics import SUMS, metrics_of, named_sums, token_sums
from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.shared_metrics import (
    CLIP_FRACTION_HIGH,
    CLIP_FRACTION_LOW,
    GRADIENT_MASS,
    OF_TOKENS,
    PPO_KL,
)
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Inputs, Tokens, tokens_of

# The sums that follow those of `token_sums`: numbers of tokens, and the mass of the gradient where A is 0, which F * A
# never has.
OBSERVED_SUMS = ("without gradient", "without gradient, r < 1", "without gradient, r > 1", "mass, A = 0")

WITHOUT_GRADIENT = "the same for tokens with a ratio below 1, and above 1; a token at a ratio of 1 is in neither"
IN_MIDDLE = (
    "sum of |g| over the tokens in M. Under `token-mean` this and the masses of the other regions have the unit of the "
    "table above: |F·A| divided by the number of all tokens"
)

# Metrics that have another meaning for a gradient than for F * A, or that stand beside a number of verl's own.
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
    metric for metric in OF_TOKENS if not metric.logged_as and metric.name not in _REPLACED
)


def observed_sums(inputs: Inputs, gradient: Tensor, bounds: Bounds, by_sequence: bool) -> Tensor:
    """Sums over tokens from which `observed_metrics` makes the metrics.

    Args:
        gradient: that of the policy term with respect to log_prob, (sequences, length).
        bounds: the bounds on the ratio that separate the regions.
        by_sequence: whether the loss clips by the sequence's mean log-ratio.

    Returns:
        The sums of `token_sums` with -gradient in the place of F * A; then the numbers of tokens that have no gradient
        although A is not 0 (all, those with a ratio below 1, those above 1); then the gradient's mass where A is 0.
        float64; additive over any split of the tokens.
    """
    t = tokens_of(inputs, LARGEST_LOG_RATIO)
    gradient = where(t.mask, gradient.to(t.ratio.dtype), 0.0)
    moved = t.log_prob - t.old_log_prob
    if by_sequence:
        moved = t.sequence_mean(moved)
    clipped = t.mask & (t.advantages != 0) & (gradient == 0)
    counts = [members.sum(dtype=torch.float64) for members in (clipped, clipped & (moved < 0), clipped & (moved > 0))]
    # True also where A is NaN, so that the sum becomes NaN and shows it.
    no_sign = ~(t.advantages.abs() > 0)
    counts.append(where(no_sign, gradient.abs(), 0.0).sum(-1).sum(dtype=torch.float64))
    ratio = bounded_of(t, by_sequence)
    return torch.cat([token_sums(t, ratio, bounds, -gradient, None, None), torch.stack(counts)])


def bounded_of(t: Tokens, by_sequence: bool) -> Tensor:
    """Returns each token's ratio or, where the loss clips by sequence, the exponential of its mean log-ratio."""
    if by_sequence:
        return t.sequence_mean(t.log_prob - t.old_log_prob).exp()
    return t.ratio


def observed_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `observed_sums`.

    Returns:
        From metric key to a 0-d float64 tensor. No key is one of verl's own, whose metrics stay as verl computes them.
    """
    return metrics_of(named_sums(sums, (*SUMS, *OBSERVED_SUMS)), OBSERVED_METRICS)
