"""What any loss does to its tokens, told by its gradient on log_prob: sums over them, and metrics of the sums."""

from typing import NamedTuple

import torch
from torch import Tensor, where

from verl_clipx.methods.method import Bounds
from verl_clipx.metrics import COUNTED, REGIONS, SUMMED, token_metrics, token_sums
from verl_clipx.tokens import Inputs, Tokens, tokens_of

# As for the plugin's own losses by default.
LOG_RATIO_CLAMP = 20.0

MASS, SHARE = "clipx/gradient_mass/", "clipx/gradient_share/"
TOKEN_SUMS = len(COUNTED) + len(SUMMED)


class ObservedTokens(NamedTuple):
    """A micro-batch's tokens and what the loss does to them.

    Args:
        log_prob, old_log_prob, advantages: (sequences, length).
        mask: bool, (sequences, length); values outside are never used.
        gradient: of the policy term with respect to log_prob, (sequences, length).
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    gradient: Tensor


def observed_sums(tokens: ObservedTokens, bounds: Bounds, by_sequence: bool) -> Tensor:
    """Sums over tokens from which `observed_metrics` makes the metrics.

    Args:
        tokens: the tokens.
        bounds: on the ratio, between the regions.
        by_sequence: whether the loss clips by the sequence's mean log-ratio.

    Returns:
        Those of `token_sums`, then the numbers of tokens without a gradient though A is not 0: all, with a ratio below
        1, above 1. float64; additive over any split of the tokens.
    """
    t = tokens_of(Inputs(*tokens[:4]), LOG_RATIO_CLAMP)
    gradient = where(t.mask, tokens.gradient.to(t.ratio.dtype), 0.0)
    moved = t.log_prob - t.old_log_prob
    if by_sequence:
        moved = t.sequence_mean(moved)
    clipped = t.mask & (t.advantages != 0) & (gradient == 0)
    counts = [members.sum(dtype=torch.float64) for members in (clipped, clipped & (moved < 0), clipped & (moved > 0))]
    return torch.cat([token_sums(t, bounded_of(t, by_sequence), bounds, gradient, None, None), torch.stack(counts)])


def bounded_of(t: Tokens, by_sequence: bool) -> Tensor:
    """What the loss clips: each token's ratio or, by sequence, that of its sequence's mean log-ratio."""
    return t.sequence_mean(t.log_prob - t.old_log_prob).exp() if by_sequence else t.ratio


def observed_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `observed_sums`.

    Returns:
        Metric name to a 0-d float64 tensor. None has the name of one of verl's own, which stay as verl computes them.
    """
    found = token_metrics(sums[:TOKEN_SUMS])
    metrics = {name: total for name, total in found.items() if not name.startswith("actor/")}
    metrics["clipx/ppo_kl"] = found["actor/ppo_kl"]
    names = ("clipx/clip_fraction", "clipx/clip_fraction_low", "clipx/clip_fraction_high")
    return {**metrics, **dict(zip(names, sums[TOKEN_SUMS:].unbind(), strict=True))}


def gradient_shares(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each region's share of the gradient mass, from the masses over the whole mini-batch.

    Args:
        metrics: metric name to its value in each update.

    Returns:
        `clipx/gradient_share/<region>` to its value in each update; 0 where no token got a gradient. Empty if there
        are no masses.
    """
    if MASS + REGIONS[0] not in metrics:
        return {}
    updates = list(zip(*(metrics[MASS + region] for region in REGIONS), strict=True))
    shares = [[mass / sum(masses) if sum(masses) != 0 else 0.0 for mass in masses] for masses in updates]
    return {SHARE + region: list(values) for region, values in zip(REGIONS, zip(*shares, strict=True), strict=True)}
