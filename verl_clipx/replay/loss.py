"""A loss on traced tokens, computed by the functions that are used in training."""

from typing import NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import declared
from verl_clipx.base.tokens import OPTIONAL, Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.loss.loss import apply, sums_of, token_statistics
from verl_clipx.loss.metrics import TOKENS, token_metrics, with_ratios_of_sums
from verl_clipx.loss.token_trace import TokenTrace, token_trace
from verl_clipx.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.run.config import Settings


class LossOnTokens(NamedTuple):
    """What a loss does to an update's tokens.

    Args:
        trace: what it does to each token, (sequences, length).
        metrics: the metrics over these tokens, by the keys under which training logs them.
    """

    trace: TokenTrace
    metrics: dict[str, float]


def refused(settings: Settings, own: Settings | None, tokens: TracedTokens) -> str | None:
    """Why a loss cannot be replayed on an update's tokens; None if it can. `own` is the run's, or None if unknown."""
    wanted = {*settings.asks_for, *(["entropy"] if settings.select is not None else [])}
    for name in (name for name in OPTIONAL if name in wanted and getattr(tokens.batch.inputs, name) is None):
        return f"{settings.method.name} needs {name}, which the trace has not for every token of step {tokens.step}."
    if not settings.adaptive or kept(settings, own, tokens):
        return None
    if settings.scope == "lagged":
        return (
            "clipx.scope=lagged decides from an earlier rollout batch: only the run's own decisions are known. "
            "Take clipx.scope=mini_batch."
        )
    if settings.scope == "micro_batch" and (tokens.batch.micro_batch is None or not tokens.whole):
        return (
            "clipx.scope=micro_batch decides from all tokens of a micro-batch, which the trace has only at "
            "clipx.trace.fraction=1, from version 2 on. Take clipx.scope=mini_batch."
        )
    return None


def kept(settings: Settings, own: Settings | None, tokens: TracedTokens) -> bool:
    """Whether a replay takes the decisions of the run itself, because its traced tokens do not determine them."""
    known = is_own(settings, own) and bool(tokens.decisions)
    of_other_tokens = tokens.decided_from is DecidedFrom.LAGGED
    return known and (of_other_tokens or not tokens.whole)


def is_own(settings: Settings, own: Settings | None) -> bool:
    """Whether a loss is the run's own, as far as it concerns the gradient of the tokens."""
    parts = ("method", "shaping", "mask", "select", "scope", "lagged_average")
    return own is not None and all(getattr(settings, name) == getattr(own, name) for name in parts)


def replayed(settings: Settings, own: Settings | None, tokens: TracedTokens, batch: TokenBatch) -> LossOnTokens:
    """A loss on tokens of an update.

    Args:
        settings: the loss, which is not `refused`.
        own: that of the run, or None if unknown.
        tokens: the update.
        batch: all tokens of the update, or a resample of them.
    """
    with torch.no_grad():
        factor = factor_of(settings, batch)
        decided_apart = settings.adaptive and (settings.scope == "micro_batch" or kept(settings, own, tokens))
        numbers = batch.micro_batch.unique().tolist() if decided_apart and batch.micro_batch is not None else [None]
        parts = []
        for number in numbers:
            rows = torch.arange(len(batch.prompt)) if number is None else (batch.micro_batch == number).nonzero()[:, 0]
            inputs = Inputs(*(None if values is None else values[rows] for values in batch.inputs))
            parts.append((rows, *_one(settings, own, tokens, inputs, factor[rows], number)))
        order = torch.cat([rows for rows, *_ in parts]).argsort()
        traces = zip(*(found for _, found, *_ in parts), strict=True)
        trace = TokenTrace(*(torch.cat(values)[order] for values in traces))
        sums = sum(found for _, _, found, _ in parts)
        means = _means(settings, sums)
        for name in parts[0][3]:
            means[name] = sum(float(own_metrics[name]) for *_, own_metrics in parts) / len(parts)
        return LossOnTokens(trace, means)


def factor_of(settings: Settings, batch: TokenBatch) -> Tensor:
    """The factor on F of rollout correction and of the entropy selection, (sequences, length)."""
    mask = batch.inputs.mask
    factor = mask.to(torch.float32) if batch.correction is None else torch.where(mask, batch.correction, 0.0)
    if settings.select is not None:
        factor = factor * settings.select.selected(batch.inputs.entropy, mask, None)
    return factor


def _one(
    settings: Settings, own: Settings | None, tokens: TracedTokens, inputs: Inputs, factor: Tensor, number: int | None
) -> tuple[TokenTrace, Tensor, dict[str, Tensor]]:
    """The tokens' trace, their sums, and the metrics of the decision; `number` is the micro-batch's."""
    method, shaping, of_decision = settings.method, settings.shaping, {}
    if kept(settings, own, tokens):
        decision = tokens.decisions[number if number is not None else next(iter(tokens.decisions))]
    else:
        statistics = _statistics(settings, tokens, inputs)
        decision = method.decide(statistics)
        of_decision = method.metrics(statistics, decision)
    applied = apply(method, shaping, inputs, decision)
    sums = sums_of(method, applied.tokens, applied.bounds, applied.weighted, inputs.counted, detailed=True)
    own_metrics = {name: one for _, found in declared(method, of_decision) for name, one in found.items()}
    logged = {f"clipx/{name}": value for name, value in own_metrics.items()}
    return token_trace(method, applied, factor), sums, logged


def _statistics(settings: Settings, tokens: TracedTokens, inputs: Inputs) -> Tensor:
    """The statistics of the whole update, extrapolated where the trace has only a share of its prompts."""
    at_ratio_one = tokens.decided_from is DecidedFrom.RATIO_ONE and "entropy" not in settings.method.asks_for
    if at_ratio_one and settings.scope == "mini_batch":
        inputs = inputs._replace(log_prob=inputs.old_log_prob)
    statistics = token_statistics(settings.method, settings.shaping, inputs)
    return statistics if tokens.whole or tokens.share is None else statistics / tokens.share


def _means(settings: Settings, sums: Tensor) -> dict[str, float]:
    dual_clipped = getattr(settings.method, "dual_clip", None) is not None
    found = {key: float(value) for key, value in token_metrics(sums, dual_clipped=dual_clipped, detailed=True).items()}
    count = max(found.pop(TOKENS), 1.0)
    means = with_ratios_of_sums({key: [value / count] for key, value in found.items()})
    return {key: value for key, (value,) in means.items()}
