"""Metrics of a whole rollout batch: what a mean over its updates would hide, and how old its samples are.

Age is counted in weight versions: the rollout batches trained since the sample's last token was generated. The metrics
of age are made of sums over tokens, so they are exact over micro-batches and ranks.
"""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import Method, declared
from verl_clipx.base.shared_metrics import AGE_FRACTION, AGE_IN_UPDATES, AGE_SPREAD, AGES, VERSIONS

MOMENTS = ("tokens", "log_ratio", "squared_log_ratio")

# The keys under which verl adds up the sums over the tokens of each age. No metric's key begins in the same way.
SUM_OF = {(moment, age): f"clipx_sum/staleness/{moment}/{age}" for moment in MOMENTS for age in AGES}
VERSIONS_SUM = "clipx_sum/staleness/versions"
SUM_KEYS = frozenset([VERSIONS_SUM, *SUM_OF.values()])


def with_updates(metrics: dict[str, list[Any]], method: Method, *, each: bool) -> dict[str, list[Any]]:
    """Adds what a mean over updates would hide: the method's `over_updates`.

    verl averages a list over the updates, so each added metric is a list with one number.

    Args:
        metrics: from metric key to its value in each update.
        each: whether to also add the method's metrics of each update, as clipx/update_0/<name>.
    """
    empty = torch.zeros(method.statistics_size + method.second_statistics_size, dtype=torch.float64)
    own = {
        name: metrics[key]
        for _, members in declared(method, method.metrics(empty, method.decide(empty)))
        for name in members
        if (key := f"clipx/{name}") in metrics
    }
    if not own:
        return metrics
    found = {f"clipx/{name}": [value] for name, value in method.over_updates(own).items()}
    if each:
        found |= {
            f"clipx/update_{update}/{name}": [value]
            for name, values in own.items()
            for update, value in enumerate(values)
        }
    return {**metrics, **found}


def merged_passes(passes: dict[str | None, dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The metrics of all passes together, and of each under its name; a single pass has the name None."""
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
    """Sums over a micro-batch's tokens from which `with_staleness` makes metrics.

    Args:
        age: weight versions since each sequence was generated, int64, (sequences,).
        log_ratio: log(current / rollout probability), (sequences, length); None if the rollout returned no
            log-probabilities.
        mask: bool, (sequences, length).

    Returns:
        0-d float64 tensors by the keys of `SUM_KEYS`: the sum of the tokens' ages; and for each age the number of
        tokens and, with log-ratios, the sums of these and of their squares.
    """
    tokens = mask.sum(1, dtype=torch.float64)
    rows = [tokens]
    if log_ratio is not None:
        moved = torch.where(mask, log_ratio.detach().to(torch.float64), 0.0)
        rows += [moved.sum(1), moved.square().sum(1)]
    sums = {VERSIONS_SUM: (age * tokens).sum()}
    group = age.clamp(max=len(AGES) - 1)
    # Without the rollout's log-probabilities, only the numbers of tokens are summed.
    for name, row in zip(MOMENTS, rows, strict=False):
        by_age = torch.zeros(len(AGES), dtype=torch.float64, device=mask.device).scatter_add(0, group, row)
        sums |= {SUM_OF[name, label]: by_age[index] for index, label in enumerate(AGES)}
    return sums


def with_staleness(
    metrics: dict[str, list[float]], *, updates_before: int, updates: int, moves: bool, detailed: bool
) -> dict[str, list[float]]:
    """Turns the sums of `staleness_sums` into metrics.

    Args:
        metrics: from metric key to its value in each update of a pass; sums over the mini-batch's tokens are divided by
            the number of tokens.
        updates_before: the number of updates on this rollout batch before this pass.
        updates: the number of updates that each rollout batch gets.
        moves: whether the run has had a sample of older weights.
        detailed: whether to add more than the mean age.

    Returns:
        The metrics without the sums; if `moves`, with the mean age; if also `detailed`, with the age in updates and the
        fraction of tokens of each age with, if its sums are given, the standard deviation of the log-ratio.
    """
    result = {key: values for key, values in metrics.items() if key not in SUM_KEYS}
    if VERSIONS_SUM not in metrics or not moves:
        return result
    versions = result[VERSIONS.key] = metrics[VERSIONS_SUM]
    if not detailed:
        return result
    result[AGE_IN_UPDATES.key] = [version * updates + updates_before + index for index, version in enumerate(versions)]
    for age in AGES:
        tokens, *moments = (metrics[SUM_OF[name, age]] for name in MOMENTS if SUM_OF[name, age] in metrics)
        result[AGE_FRACTION[age].key] = tokens
        if moments:
            result[AGE_SPREAD[age].key] = [
                max(square / count - (value / count) ** 2, 0.0) ** 0.5 if count > 0 else 0.0
                for count, value, square in zip(tokens, *moments, strict=True)
            ]
    return result
