"""Metrics of a whole rollout batch: what a mean over its updates would hide, and how old its samples are.

Age is counted in weight versions: the rollout batches trained since the sample's last token was generated. Everything
is a sum over tokens, so that it comes out exact over micro-batches and ranks.
"""

from typing import Any

import torch
from torch import Tensor

EPSILON, COUNT = "clipx/epsilon/bin_", "clipx/count/bin_"

AGES = ("age_0", "age_1", "age_2", "age_3_or_more")
MOMENTS = ("tokens", "log_ratio", "squared_log_ratio")
PREFIX = "clipx/staleness"


def with_summary(metrics: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Adds what a mean over updates would hide: ACPO's highest bound and its average over tokens.

    verl averages a list over the updates, so each of these is one number.

    Args:
        metrics: metric name to its value in each update.

    Returns:
        The same metrics, with clipx/epsilon_highest (over bins with tokens and updates) and clipx/epsilon_average
        (weighted by the bins' tokens) where there are epsilons.
    """
    bins = [key.removeprefix(EPSILON) for key in metrics if key.startswith(EPSILON)]
    pairs = [
        (epsilon, count)
        for index in bins
        for epsilon, count in zip(metrics[EPSILON + index], metrics[COUNT + index], strict=True)
        if count > 0
    ]
    if not pairs:
        return metrics
    average = sum(epsilon * count for epsilon, count in pairs) / sum(count for _, count in pairs)
    highest = max(epsilon for epsilon, _ in pairs)
    return {**metrics, "clipx/epsilon_highest": [highest], "clipx/epsilon_average": [average]}


def merged_passes(passes: dict[str | None, dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The metrics of all passes together, and those of each pass under its own name.

    Args:
        passes: name of the pass (None: there is only one) to its metrics.
    """
    if len(passes) == 1:
        return next(iter(passes.values()))
    merged: dict[str, list[Any]] = {}
    for name, metrics in passes.items():
        for key, values in metrics.items():
            merged.setdefault(key, []).extend(values)
            if not key.startswith("perf/"):
                merged[f"clipx/{name}/{key.removeprefix('clipx/')}"] = list(values)
    return merged


def staleness_sums(age: Tensor, *, log_ratio: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
    """Sums over a micro-batch's tokens.

    Args:
        age: int64, (sequences,).
        log_ratio: current over rollout log-probability, (sequences, length); None if the rollout returned none.
        mask: bool, (sequences, length).

    Returns:
        0-d float64 tensors: `clipx/staleness/versions`, the sum of the tokens' ages, and
        `clipx/staleness/<moment>/<age>`: tokens, log-ratios and squared log-ratios of the tokens of each age.
    """
    tokens = mask.sum(1, dtype=torch.float64)
    moved = torch.zeros_like(mask, dtype=torch.float64)
    if log_ratio is not None:
        moved = torch.where(mask, log_ratio.detach().to(torch.float64), 0.0)
    sums = {f"{PREFIX}/versions": (age * tokens).sum()}
    group = age.clamp(max=len(AGES) - 1)
    for name, row in zip(MOMENTS, (tokens, moved.sum(1), moved.square().sum(1)), strict=True):
        by_age = torch.zeros(len(AGES), dtype=torch.float64, device=mask.device).scatter_add(0, group, row)
        sums |= {f"{PREFIX}/{name}/{label}": by_age[index] for index, label in enumerate(AGES)}
    return sums


def with_spread(metrics: dict[str, list[float]], *, updates_before: int, updates: int) -> dict[str, list[float]]:
    """Turns sums by age into the standard deviation of the log-ratio, and versions into updates since the rollout.

    Args:
        metrics: metric name to its value in each update of a pass; sums over the mini-batch's tokens, divided by their
            number.
        updates_before: updates on this rollout batch before this pass.
        updates: updates that each rollout batch gets.

    Returns:
        The metrics with `clipx/staleness/updates` and, by age, `clipx/staleness/fraction/<age>` (of the tokens) and
        `clipx/staleness/spread/<age>` (0 where no token has that age) in the place of the sums.
    """
    versions = metrics.get(f"{PREFIX}/versions")
    if versions is None:
        return metrics
    result = dict(metrics)
    result[f"{PREFIX}/updates"] = [version * updates + updates_before + index for index, version in enumerate(versions)]
    for age in AGES:
        tokens, total, squares = (result.pop(f"{PREFIX}/{name}/{age}") for name in MOMENTS)
        result[f"{PREFIX}/fraction/{age}"] = tokens
        result[f"{PREFIX}/spread/{age}"] = [
            max(square / count - (value / count) ** 2, 0.0) ** 0.5 if count > 0 else 0.0
            for count, value, square in zip(tokens, total, squares, strict=True)
        ]
    return result
