"""Metrics of a whole rollout batch: what a mean over its updates would hide, and how old its samples are.

Age is counted in weight versions: the rollout batches trained since the sample's last token was generated. Its mean is
made of a sum over tokens, so it is exact over micro-batches and ranks.
"""

from typing import Any

import torch

from verl_clipx.base.method import Method, declared
from verl_clipx.base.shared_metrics import VERSIONS

# The key under which verl adds up the ages of a mini-batch's tokens. No metric's key begins in the same way.
VERSIONS_SUM = "clipx_sum/staleness/versions"


def with_updates(metrics: dict[str, list[Any]], method: Method) -> dict[str, list[Any]]:
    """Adds what a mean over updates would hide: the method's `over_updates`.

    verl averages a list over the updates, so each added metric is a list with one number.

    Args:
        metrics: from metric key to its value in each update.
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
    return metrics | {f"clipx/{name}": [value] for name, value in method.over_updates(own).items()}


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


def with_age(metrics: dict[str, list[Any]], *, shown: bool) -> dict[str, list[Any]]:
    """Turns the sum of the tokens' ages into their mean.

    Args:
        metrics: from metric key to its value in each update; the sum is divided by the mini-batch's tokens.
        shown: whether the run has had a sample of older weights; before that, the mean is left out.
    """
    result = {key: values for key, values in metrics.items() if key != VERSIONS_SUM}
    return result | {VERSIONS.key: metrics[VERSIONS_SUM]} if shown and VERSIONS_SUM in metrics else result
