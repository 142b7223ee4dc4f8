"""The metrics of a policy loss: sums over tokens, their single transfer to the host, and the metrics made of them.

Last come those of a whole rollout batch: what a mean over its updates would hide, and the mean age of its samples. It
is made of a sum over tokens, so it is exact over micro-batches and ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, Method, find_declarations
from verl_clipx.losses.base.metric import Metric, Over
from verl_clipx.losses.base.shared_metrics import FLOORS, OF_TOKENS, VERSIONS, VERSIONS_FIRST
from verl_clipx.losses.base.tokens import Tokens, number_in, parts

TOKENS = "tokens"

# A token's region as a number: the sign of A, times 1 below the bounds, 2 between them, 3 above. 0, if A is 0, is in M.
NUMBERS = {"LN": -1, "HP": 3, "LP": 1, "HN": -3, "M, A < 0": -2, "M, A > 0": 2}

# The number for tokens that do not count.
OUTSIDE = 9.0

# The sums that `token_sums` returns: numbers of tokens, sums over tokens, and the gradient mass |F * A| of regions.
COUNTED = ("LN", "HP")
MASSES = {f"mass/{region}": number for region, number in NUMBERS.items()}
SUMS = (TOKENS, "dual_clipped", "log_ratio", "ratio", "squared_ratio", *COUNTED, *MASSES)

# Sums from which metrics are made only once they cover the whole mini-batch, by the keys under which verl adds them up.
SUM_KEYS = {f"clipx_sum/{name}": name for metric in OF_TOKENS if metric.over is Over.UPDATE for name in metric.sums}

# The metrics of the samples' ages, by the keys under which verl adds up those of a mini-batch's tokens: since the first
# and since the last token of their sequence was generated. No metric's key begins in the same way.
AGE_SUMS = {f"clipx_sum/{metric.name}": metric.key for metric in (VERSIONS_FIRST, VERSIONS)}

# The keys of everything that is linear in |F * A|.
OF_GRADIENT = frozenset(metric.key for metric in OF_TOKENS if MASSES.keys() & {*metric.sums})


def token_sums(
    t: Tokens,
    bounded: Tensor,
    bounds: Bounds,
    weighted: Tensor,
    dual_clip: float | None,
    counted: Tensor | None,
) -> Tensor:
    """Sums over tokens from which `token_metrics` makes the metrics.

    Args:
        bounded: what the bounds act on, (sequences, length).
        bounds: clip bounds on it, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.

    Returns:
        (len(SUMS),), float64, in the order of `SUMS`; additive over any split of the tokens.
    """
    counted = t.mask if counted is None else t.mask & counted
    # No ratio is below 0; a constant would not do, because a sum of constant zeros would be another launch.
    above_dual_clip = t.ratio < 0 if dual_clip is None else (t.advantages < 0) & (t.ratio > dual_clip)

    def total(values: Tensor, members: Tensor) -> Tensor:
        # Each part is summed in the values' precision and only the parts in float64, without a float64 copy of all.
        return parts(where(members, values, 0.0)).sum(-1)

    # Sums that need neither the region nor the mass of a token come first: uncompiled, both are stored once computed.
    sums = [number_in(counted), number_in(counted & above_dual_clip)]
    del above_dual_clip
    sums += [total(t.log_ratio, counted), total(t.ratio, counted), total(t.ratio.square(), counted)]
    region = region_of(t, bounded, bounds, counted)
    sums += [number_in(region == NUMBERS[name]) for name in COUNTED]
    mass = weighted.abs()
    sums += [total(mass, region == number) for number in MASSES.values()]
    return torch.stack(sums).sum(-1, dtype=torch.float64)


def region_of(t: Tokens, bounded: Tensor, bounds: Bounds, counted: Tensor) -> Tensor:
    """Each token's region: one of `NUMBERS`, 0, or `OUTSIDE` for tokens that do not count, (sequences, length)."""
    # One number per token, because masks that several sums use would each be stored, one byte per token.
    side = where(bounded > bounds.high, 3.0, where(bounded < bounds.low, 1.0, 2.0))
    return where(counted, t.advantages.sign() * side, OUTSIDE).to(t.ratio.dtype)


def named_sums(sums: Iterable[Any], names: Iterable[str] = SUMS) -> dict[str, Any]:
    """Returns sums by their names, mostly those of `token_sums`, as 0-d tensors or, from the host, as floats."""
    return dict(zip(names, sums, strict=True))


def token_metrics(sums: Iterable[Any], *, dual_clipped: bool = False) -> dict[str, Any]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `token_sums`: a tensor or, so that the accelerator has nothing to add up, the floats on the host.
        dual_clipped: whether the method has a dual clip.

    Returns:
        From key to a number of the same kind as in `sums`: the metrics over tokens, the sums of `SUM_KEYS`, and
        `tokens`, the number of tokens.
    """
    named = named_sums(sums)
    if not dual_clipped:
        del named["dual_clipped"]
    return metrics_of(named, OF_TOKENS)


def metrics_of(sums: Mapping[str, Any], metrics: Iterable[Metric]) -> dict[str, Any]:
    """Returns those of the metrics for which all sums are given, by name, as `token_metrics` does."""
    means = {}
    for metric in metrics:
        if metric.over is Over.TOKENS and all(name in sums for name in metric.sums):
            own_sums = [sums[name] for name in metric.sums]
            means[metric.key] = metric.of(*own_sums)
    # `with_ratios_of_sums` needs these over the whole mini-batch.
    carried = {key: sums[name] for key, name in SUM_KEYS.items() if name in sums}
    return {TOKENS: sums[TOKENS], **means, **carried}


def with_ratios_of_sums(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Replaces the sums of `SUM_KEYS` by the metrics that are made of them.

    Args:
        metrics: from key to its value in each update: sums over the mini-batch's tokens, divided by their number.
    """
    sums = {name: metrics[key] for key, name in SUM_KEYS.items() if key in metrics}
    result = {key: values for key, values in metrics.items() if key not in SUM_KEYS}
    for metric in OF_TOKENS:
        if metric.over is Over.UPDATE and all(name in sums for name in metric.sums):
            own_sums = [sums[name] for name in metric.sums]
            # In each update there is one value of each of the metric's sums.
            result[metric.key] = [metric.of(*of_update) for of_update in zip(*own_sums, strict=True)]
    return result


def to_host(*groups: dict[str, Tensor]) -> list[dict[str, float]]:
    """Moves groups of 0-d tensors of one device to the host in one transfer.

    Args:
        groups: each from a name to a tensor.

    Returns:
        The same groups, with Python floats in the place of the tensors.
    """
    tensors = [tensor.to(torch.float64) for group in groups for tensor in group.values()]
    if not tensors:
        return [{} for _ in groups]
    floats = iter(torch.stack(tensors).tolist())
    return [{name: next(floats) for name in group} for group in groups]


def with_updates(metrics: dict[str, list[Any]], method: Method) -> dict[str, list[Any]]:
    """Adds what a mean over updates would hide: the method's `over_updates`.

    verl averages a list over the updates, so each added metric is a list with one number.

    Args:
        metrics: from metric key to its value in each update.
    """
    empty = torch.zeros(method.statistics_size + method.second_statistics_size, dtype=torch.float64)
    of_method = {}
    for _, members in find_declarations(method, method.metrics(empty, method.decide(empty))):
        for name in members:
            if f"clipx/{name}" in metrics:
                of_method[name] = metrics[f"clipx/{name}"]
    if not of_method:
        return metrics
    return metrics | {f"clipx/{name}": [value] for name, value in method.over_updates(of_method).items()}


# What begins the keys of metrics that belong to a rollout batch whatever its passes are.
OF_ROLLOUT_BATCH = ("perf/", *(floor.log_ratio.key.removesuffix("log_ratio") for floor in FLOORS))


def merged_passes(passes: dict[str | None, dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Returns the metrics of a rollout batch that is trained in several passes.

    Args:
        passes: from a pass's name to its metrics, each with its value in each update; a single pass has the name None.

    Returns:
        Under its own key each metric with the values of all passes, and besides, under `clipx/<pass>/<key>`, with those
        of each pass alone. The metrics of a single pass are returned as they are.
    """
    if len(passes) == 1:
        return next(iter(passes.values()))
    merged: dict[str, list[Any]] = {}
    for name, metrics in passes.items():
        for key, values in metrics.items():
            merged.setdefault(key, []).extend(values)
            if not key.startswith(OF_ROLLOUT_BATCH):
                merged[f"clipx/{name}/{key.removeprefix('clipx/')}"] = list(values)
    return merged


def with_age(metrics: dict[str, list[Any]], *, shown: bool) -> dict[str, list[Any]]:
    """Turns the sums of the tokens' ages into their means.

    Args:
        metrics: from metric key to its value in each update; the sums are divided by the mini-batch's tokens.
        shown: whether the run has had a sample of older weights; before that, the means are left out.
    """
    result = {key: values for key, values in metrics.items() if key not in AGE_SUMS}
    if shown:
        result |= {name: metrics[key] for key, name in AGE_SUMS.items() if key in metrics}
    return result
