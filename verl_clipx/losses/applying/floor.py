"""The floor: what a loss sees of tokens whose ratio is 1 but for arithmetic, as sums that add up over any split."""

from collections.abc import Mapping

import torch
from torch import Tensor, where

from verl_clipx.losses.base.shared_metrics import CLIP_FRACTION_HIGH, CLIP_FRACTION_LOW, FLOOR_BINS, Floor
from verl_clipx.losses.base.tokens import Inputs, compute_dtype


def floor_sums(inputs: Inputs, floor: Floor) -> dict[str, Tensor]:
    """Sums the absolute log-ratios of the tokens that count, for a mean over them.

    Args:
        floor: which of the two measurements it is.

    Returns:
        From metric key to a 0-d float64 tensor.
    """
    counted, log_ratio = _counted_log_ratios(inputs)
    return {floor.log_ratio.key: where(counted, log_ratio.abs(), 0.0).sum()}


def floor_bins(inputs: Inputs, floor: Floor) -> dict[str, Tensor]:
    """Sums 1, log r and (log r)^2 over the tokens that count, in each bin of the old policy's probability.

    Args:
        floor: which of the two measurements it is.

    Returns:
        From metric key to a 0-d float64 tensor. The sums are not divided by anything.
    """
    counted, log_ratio = _counted_log_ratios(inputs)
    probability = inputs.old_log_prob.detach().to(torch.float64).exp()
    # Rounding can put a probability above 1; the last bin contains its upper edge.
    bins = where(counted, (probability * FLOOR_BINS).floor().clamp(0, FLOOR_BINS - 1), -1.0)
    sums: dict[str, Tensor] = {}
    for number in range(FLOOR_BINS):
        members = bins == number
        in_bin = where(members, log_ratio, 0.0)
        sums[f"{floor.tokens.key}/bin_{number}"] = members.sum(dtype=torch.float64)
        sums[f"{floor.log_ratio_sum.key}/bin_{number}"] = in_bin.sum()
        sums[f"{floor.squared_sum.key}/bin_{number}"] = in_bin.square().sum()
    return sums


def clipped_at_ratio_one(sums: Mapping[str, float], floor: Floor) -> dict[str, float]:
    """Returns which tokens an update at ratio 1 clipped, under the floor's keys.

    Args:
        sums: the update's sums by metric key, among them the tokens clipped below and above.
        floor: which of the two measurements it is.

    Returns:
        The same two sums under the keys of the floor's clip fractions.
    """
    return {
        floor.clip_fraction_low.key: sums[CLIP_FRACTION_LOW.key],
        floor.clip_fraction_high.key: sums[CLIP_FRACTION_HIGH.key],
    }


def _counted_log_ratios(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the tokens that count, bool, and every token's log-ratio as the loss computes it, in float64."""
    counted = inputs.mask if inputs.counted is None else inputs.mask & inputs.counted
    # The loss subtracts in float32, which rounds too.
    dtype = compute_dtype(inputs.log_prob.dtype)
    log_ratio = inputs.log_prob.detach().to(dtype) - inputs.old_log_prob.detach().to(dtype)
    return counted, log_ratio.to(torch.float64)
