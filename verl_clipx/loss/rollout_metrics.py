"""Metrics of a whole rollout batch: what a mean over its updates would hide, and how old its samples are.

Age is counted in weight versions: the rollout batches trained since the sample's last token was generated. Everything
is a sum over tokens, so that it comes out exact over micro-batches and ranks.
"""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import Method, declared
from verl_clipx.base.shared_metrics import AGE_FRACTION, AGE_IN_UPDATES, AGE_SPREAD, AGES, VERSIONS

MOMENTS = ("tokens", "log_ratio", "squared_log_ratio")

# Sums over the tokens of each age, by the keys under which verl adds them up; no metric's key begins like these.
SUM_OF = {(moment, age): f"clipx_sum/staleness/{moment}/{age}" for moment in MOMENTS for age in AGES}
VERSIONS_SUM = "clipx_sum/staleness/versions"
SUM_KEYS = frozenset([VERSIONS_SUM, *SUM_OF.values()])


def with_updates(metrics: dict[str, list[Any]], method: Method, *, each: bool) -> dict[str, list[Any]]:
    """Adds what a mean over updates would hide: the bounds that single updates used.

    verl averages a list over the updates, so each of these is one number.

    Args:
        metrics: metric name to its value in each update.
        method: the method, which says what to log of its own metrics.
        each: whether to log them for each update.

    Returns:
        The same metrics, with what the method's `over_updates` says and, where wanted, clipx/update_<number>/<name>,
        numbered from 0.
    """
    empty = torch.zeros(method.statistics_size, dtype=torch.float64)
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
        0-d float64 tensors by the keys of `SUM_KEYS`: the sum of the tokens' ages, and of the tokens of each age their
        number and the sums of log-ratios and squared log-ratios.
    """
    tokens = mask.sum(1, dtype=torch.float64)
    rows = [tokens]
    if log_ratio is not None:
        moved = torch.where(mask, log_ratio.detach().to(torch.float64), 0.0)
        rows += [moved.sum(1), moved.square().sum(1)]
    sums = {VERSIONS_SUM: (age * tokens).sum()}
    group = age.clamp(max=len(AGES) - 1)
    # Without the rollout's log-probabilities the tokens alone.
    for name, row in zip(MOMENTS, rows, strict=False):
        by_age = torch.zeros(len(AGES), dtype=torch.float64, device=mask.device).scatter_add(0, group, row)
        sums |= {SUM_OF[name, label]: by_age[index] for index, label in enumerate(AGES)}
    return sums


def with_staleness(
    metrics: dict[str, list[float]], *, updates_before: int, updates: int, moves: bool, detailed: bool
) -> dict[str, list[float]]:
    """Turns the sums of `staleness_sums` into metrics.

    Args:
        metrics: metric name to its value in each update of a pass; sums over the mini-batch's tokens, divided by their
            number.
        updates_before: updates on this rollout batch before this pass.
        updates: updates that each rollout batch gets.
        moves: whether the run has had a sample of older weights.
        detailed: whether to log more than the mean age.

    Returns:
        The metrics without the sums; where the age moves, with the mean age, and detailed the age in updates and by age
        the tokens' fraction and, where the sums are there, the log-ratio's standard deviation (0 where no token has
        that age).
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
