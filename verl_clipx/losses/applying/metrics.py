"""The metrics of a policy loss: sums over tokens, their single transfer to the host, and the metrics made of them.

The last functions make the metrics of a whole rollout batch: what a mean over its updates would hide, and the mean age
of its samples. The mean age is made of a sum over tokens, so it is exact over micro-batches and ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, Method, find_declarations
from verl_clipx.losses.base.metric import Metric, Over
from verl_clipx.losses.base.shared_metrics import FLOORS, TOKEN_METRICS, VERSIONS, VERSIONS_FIRST
from verl_clipx.losses.base.tokens import Tokens, number_in, parts

# The number of tokens has this name among the sums, and this key among the metrics.
TOKENS = "tokens"

# From DGPO's regions to the numbers that stand for them: the sign of A, times 1 below the bounds, 2 between them and 3
# above them. A token with A = 0 has the number 0 and belongs to M.
NUMBERS = {"LN": -1, "HP": 3, "LP": 1, "HN": -3, "M, A < 0": -2, "M, A > 0": 2}

# The number for tokens that do not count.
OUTSIDE = 9.0

# The names of the sums that `token_sums` returns, in order. The sum of a region of `COUNTED_REGIONS` is its number of
# tokens. A sum of `MASSES` is the gradient mass |F * A| of a region, which stands there with its number.
COUNTED_REGIONS = ("LN", "HP")
MASSES = {f"mass/{region}": number for region, number in NUMBERS.items()}
SUMS = (TOKENS, "dual_clipped", "log_ratio", "ratio", "squared_ratio", *COUNTED_REGIONS, *MASSES)

# The sums that must cover the whole mini-batch before metrics are made of them: from the key under which verl adds a
# sum up to the sum's name in `SUMS`.
SUM_NAME_BY_KEY = {
    f"clipx_sum/{name}": name for metric in TOKEN_METRICS if metric.over is Over.UPDATE for name in metric.sums
}

# From the key under which verl adds up the ages of a mini-batch's tokens to the key of the metric, their mean. An age
# is counted since the first or since the last token of a sequence was generated. No metric's key begins with
# clipx_sum/.
AGE_KEY_BY_SUM_KEY = {f"clipx_sum/{metric.name}": metric.key for metric in (VERSIONS_FIRST, VERSIONS)}

# The keys of all metrics that are linear in |F * A|.
OF_GRADIENT = frozenset(metric.key for metric in TOKEN_METRICS if MASSES.keys() & {*metric.sums})


def token_sums(
    t: Tokens,
    bounded: Tensor,
    bounds: Bounds,
    weighted: Tensor,
    dual_clip: float | None,
    counted: Tensor | None,
) -> Tensor:
    """Return the sums over tokens from which `token_metrics` makes the metrics.

    Args:
        t: the tokens.
        bounded: what the bounds act on, (sequences, length).
        bounds: the clip bounds on it, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.
        counted: the tokens of the mask that count, bool, (sequences, length); None: all of them.

    Returns:
        (len(SUMS),), float64, in the order of `SUMS`; additive over any split of the tokens.
    """
    is_counted = t.mask if counted is None else t.mask & counted
    if dual_clip is None:
        # False for every token, because no ratio is negative. A constant would cost another kernel launch.
        is_dual_clipped = t.ratio < 0
    else:
        is_dual_clipped = t.ratio > dual_clip
        is_dual_clipped = is_dual_clipped & (t.advantages < 0)

    def sum_over(members: Tensor, values: Tensor) -> Tensor:
        """Return the sums of the members' values in each of `parts`, (rows,)."""
        # Each part is summed in the values' precision and only the sums of parts in float64, so that there is no
        # float64 copy of all tokens.
        return parts(where(members, values, 0.0)).sum(-1)

    # In the order of `SUMS`. Uncompiled, the region and the mass of the tokens stay in memory once they are computed,
    # so the sums that need neither are computed before them.
    sums = [number_in(is_counted), number_in(is_counted & is_dual_clipped)]
    del is_dual_clipped
    sums += [sum_over(is_counted, t.log_ratio), sum_over(is_counted, t.ratio), sum_over(is_counted, t.ratio.square())]
    region = find_region(t, bounded, bounds, is_counted)
    sums += [number_in(region == NUMBERS[name]) for name in COUNTED_REGIONS]
    mass = weighted.abs()
    sums += [sum_over(region == number, mass) for number in MASSES.values()]
    return torch.stack(sums).sum(-1, dtype=torch.float64)


def find_region(t: Tokens, bounded: Tensor, bounds: Bounds, is_counted: Tensor) -> Tensor:
    """Return each token's region as a number, in the ratio's dtype, (sequences, length).

    It is one of `NUMBERS`, 0 for a token with A = 0, or `OUTSIDE` for a token that does not count.

    Args:
        t: the tokens.
        bounded: what the bounds act on, (sequences, length).
        bounds: the clip bounds on it, broadcastable.
        is_counted: the tokens that count, bool, (sequences, length).
    """
    # One number per token, because masks that several sums use would each be stored, one byte per token.
    side = where(bounded > bounds.high, 3.0, where(bounded < bounds.low, 1.0, 2.0))
    return where(is_counted, t.advantages.sign() * side, OUTSIDE).to(t.ratio.dtype)


def name_sums(sums: Iterable[Any], names: Iterable[str] = SUMS) -> dict[str, Any]:
    """Return sums by their names.

    Args:
        sums: 0-d tensors, a tensor of one dimension, or floats on the host.
        names: the names of the sums, in the same order.
    """
    return dict(zip(names, sums, strict=True))


def token_metrics(sums: Iterable[Any], *, dual_clipped: bool = False) -> dict[str, Any]:
    """Return the metrics over the tokens of a micro-batch, each times the number of tokens.

    They are sums, because sums add up over micro-batches and ranks. Who has added them up divides by the number of all
    tokens.

    Args:
        sums: the sums of `token_sums`, in the order of `SUMS`: a tensor, (len(SUMS),), or floats on the host, which
            spare the accelerator the additions.
        dual_clipped: whether the method has a dual clip.

    Returns:
        What `make_metrics` returns for the metrics of `TOKEN_METRICS`.
    """
    sums_by_name = name_sums(sums)
    if not dual_clipped:
        # Without this sum, `make_metrics` leaves pg_clipfrac_lower out.
        del sums_by_name["dual_clipped"]
    return make_metrics(sums_by_name, TOKEN_METRICS)


def make_metrics(sums: Mapping[str, Any], metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return the metrics over tokens for which all sums are given, each times the number of tokens.

    Args:
        sums: from the name of a sum to the sum; `tokens` must be among them.
        metrics: the metrics to make; those that are not over tokens are left out.

    Returns:
        From key to a number of the same kind as in `sums`: the metrics times the number of tokens; the given sums of
        `SUM_NAME_BY_KEY`; and `tokens`, the number of tokens.
    """
    totals = {}
    for metric in metrics:
        if metric.over is Over.TOKENS and all(name in sums for name in metric.sums):
            own_sums = [sums[name] for name in metric.sums]
            totals[metric.key] = metric.compute(*own_sums)
    # `replace_sums_with_metrics` needs these over the whole mini-batch.
    carried = {key: sums[name] for key, name in SUM_NAME_BY_KEY.items() if name in sums}
    return {TOKENS: sums[TOKENS], **totals, **carried}


def replace_sums_with_metrics(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Replace the sums of `SUM_NAME_BY_KEY` with the metrics that are made of them.

    Args:
        metrics: from key to one value per update. Under a key of `SUM_NAME_BY_KEY`, a value is a sum over the
            mini-batch's tokens, divided by their number. The other metrics may be any.

    Returns:
        The other metrics unchanged, and each metric over an update whose sums are all given. The sums themselves are
        never returned.
    """
    sums = {name: metrics[key] for key, name in SUM_NAME_BY_KEY.items() if key in metrics}
    result = {key: values for key, values in metrics.items() if key not in SUM_NAME_BY_KEY}
    for metric in TOKEN_METRICS:
        if metric.over is Over.UPDATE and all(name in sums for name in metric.sums):
            # A list with one value per update for each of the metric's sums.
            own_sums = [sums[name] for name in metric.sums]
            result[metric.key] = [metric.compute(*sums_of_update) for sums_of_update in zip(*own_sums, strict=True)]
    return result


def to_host(*groups: dict[str, Tensor]) -> list[dict[str, float]]:
    """Move groups of 0-d tensors of one device to the host in one transfer.

    Args:
        groups: each from a name to a tensor.

    Returns:
        The same groups, with Python floats in the place of the tensors.
    """
    tensors = [tensor.to(torch.float64) for group in groups for tensor in group.values()]
    if not tensors:
        return [{} for _ in groups]
    # In the order of the tensors, so the groups below take them one after another.
    floats = iter(torch.stack(tensors).tolist())
    return [{name: next(floats) for name in group} for group in groups]


def add_metrics_over_updates(metrics: dict[str, list[Any]], method: Method) -> dict[str, list[Any]]:
    """Return the metrics of a rollout batch, together with what the method's `over_updates` makes of its own ones.

    verl logs the mean of each list. An added metric is one number for all updates, such as their highest value, so its
    list has that number alone.

    Args:
        metrics: from metric key to its value in each update.
        method: the method that logged the metrics.
    """
    # The names of a method's metrics do not depend on the data, so those of no tokens tell which keys to look for.
    size = method.statistics_size + method.second_statistics_size
    statistics_of_no_tokens = torch.zeros(size, dtype=torch.float64)
    metrics_of_no_tokens = method.metrics(statistics_of_no_tokens, method.decide(statistics_of_no_tokens))
    values_by_name = {}
    for _, members in find_declarations(method, metrics_of_no_tokens):
        for name in members:
            key = f"clipx/{name}"
            if key in metrics:
                values_by_name[name] = metrics[key]
    if not values_by_name:
        return metrics
    result = dict(metrics)
    for name, value in method.over_updates(values_by_name).items():
        result[f"clipx/{name}"] = [value]
    return result


# Prefixes of the keys of metrics that belong to the rollout batch as a whole and not to one of its passes.
OF_ROLLOUT_BATCH = ("perf/", *(floor.log_ratio.key.removesuffix("log_ratio") for floor in FLOORS))


def merge_metrics_of_passes(passes: dict[str | None, dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the metrics of a rollout batch that is trained in several passes.

    Args:
        passes: from a pass's name to its metrics, each of which has a value for each update. A single pass has the name
            None.

    Returns:
        Each metric under its own key with the values of all passes, and again under `clipx/<pass>/<key>` with the
        values of that pass, except for the keys that begin with one of `OF_ROLLOUT_BATCH`. The metrics of a single pass
        are returned as they are.
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


def rename_ages(metrics: dict[str, list[Any]], *, shown: bool) -> dict[str, list[Any]]:
    """Return the metrics with the mean ages of the tokens under their metric keys, or without the mean ages.

    Args:
        metrics: from key to one value per update. The mean ages have the keys of `AGE_KEY_BY_SUM_KEY`.
        shown: whether the mean ages are returned: only once the run has had a sample of older weights.
    """
    result = {key: values for key, values in metrics.items() if key not in AGE_KEY_BY_SUM_KEY}
    if not shown:
        return result
    for key, metric_key in AGE_KEY_BY_SUM_KEY.items():
        if key in metrics:
            result[metric_key] = metrics[key]
    return result
