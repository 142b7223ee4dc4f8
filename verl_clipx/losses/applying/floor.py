"""Measures the floor, which is how far rounding alone moves ratios that would be 1 without it, as sums over tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor, where

from verl_clipx.losses.base.shared_metrics import CLIP_FRACTION_HIGH, CLIP_FRACTION_LOW, FLOOR_BINS, Floor
from verl_clipx.losses.base.tokens import Inputs, compute_dtype


def floor_sums(inputs: Inputs, floor: Floor) -> dict[str, Tensor]:
    """Sum the absolute log-ratios of the counted tokens. Divided by their number, it is their mean.

    Args:
        inputs: the tokens of a micro-batch.
        floor: the metrics of the measurement, FLOOR or FLOOR_RECUT, whose keys the sum gets.

    Returns:
        One entry, from the metric's key to a 0-d float64 tensor.
    """
    is_counted = _select_counted(inputs)
    log_ratio = _compute_log_ratio(inputs)
    return {floor.log_ratio.key: where(is_counted, log_ratio.abs(), 0.0).sum()}


def floor_bins(inputs: Inputs, floor: Floor) -> dict[str, Tensor]:
    """Count the counted tokens and sum log r and (log r)^2 in each bin of the old policy's probability.

    Args:
        inputs: the tokens of a micro-batch.
        floor: the metrics of the measurement, FLOOR or FLOOR_RECUT, whose keys the sums get.

    Returns:
        From a metric's key and a bin, as in KEY/bin_0, to a 0-d float64 tensor. The sums are not divided by anything.
    """
    is_counted = _select_counted(inputs)
    log_ratio = _compute_log_ratio(inputs)
    probability = inputs.old_log_prob.detach().to(torch.float64).exp()
    # Rounding can put a probability above 1; the last bin contains its upper edge.
    bin_of_token = (probability * FLOOR_BINS).floor().clamp(0, FLOOR_BINS - 1)
    sums: dict[str, Tensor] = {}
    for number in range(FLOOR_BINS):
        is_in_bin = is_counted & (bin_of_token == number)
        log_ratio_in_bin = where(is_in_bin, log_ratio, 0.0)
        sums[f"{floor.tokens.key}/bin_{number}"] = is_in_bin.sum(dtype=torch.float64)
        sums[f"{floor.log_ratio_sum.key}/bin_{number}"] = log_ratio_in_bin.sum()
        sums[f"{floor.squared_sum.key}/bin_{number}"] = log_ratio_in_bin.square().sum()
    return sums


def clipped_at_ratio_one(sums: Mapping[str, float], floor: Floor) -> dict[str, float]:
    """Return how many tokens of an update at ratio 1 are clipped, under the keys of the floor's clip fractions.

    Args:
        sums: the update's sums by metric key, among them the tokens clipped below and above.
        floor: the metrics of the measurement, FLOOR or FLOOR_RECUT.

    Returns:
        Two entries: the sums of the tokens clipped below and above, unchanged, under the floor's keys.
    """
    return {
        floor.clip_fraction_low.key: sums[CLIP_FRACTION_LOW.key],
        floor.clip_fraction_high.key: sums[CLIP_FRACTION_HIGH.key],
    }


def _select_counted(inputs: Inputs) -> Tensor:
    """Return the tokens in the mask that statistics and metrics count: bool, (sequences, length)."""
    if inputs.counted is None:
        return inputs.mask
    return inputs.mask & inputs.counted


def _compute_log_ratio(inputs: Inputs) -> Tensor:
    """Return every token's log-ratio as the loss computes it, converted to float64: (sequences, length)."""
    # In the loss's dtype first: its subtraction rounds, and the floor measures that too.
    dtype = compute_dtype(inputs.log_prob.dtype)
    log_ratio = inputs.log_prob.detach().to(dtype) - inputs.old_log_prob.detach().to(dtype)
    return log_ratio.to(torch.float64)
