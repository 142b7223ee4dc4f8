"""A loss on traced tokens, computed by the functions that are used in training."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.losses.applying.loss import apply, token_statistics
from verl_clipx.losses.applying.metrics import TOKENS, token_metrics, token_sums, with_ratios_of_sums
from verl_clipx.losses.applying.token_trace import TokenTrace, token_trace
from verl_clipx.losses.base.method import declared
from verl_clipx.losses.base.tokens import OPTIONAL, Inputs
from verl_clipx.losses.modifiers.masks import remaining
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom


class LossOnTokens(NamedTuple):
    """A loss on each of an update's tokens, (sequences, length).

    Args:
        metrics: over the tokens, as logged.
        mask: the tokens that the loss trains on, bool.
    """

    trace: TokenTrace
    metrics: dict[str, float]
    mask: Tensor


def why_refused(settings: Settings, own: Settings | None, tokens: TracedTokens) -> str | None:
    """Says why a loss can't be replayed on an update's tokens; None if it can. `own` is the run's, None if unknown."""
    wanted = {*settings.asks_for, *(["entropy"] if settings.select is not None else [])}
    for name in (name for name in OPTIONAL if name in wanted and getattr(tokens.batch.inputs, name) is None):
        return f"{settings.method.name} needs {name}, which the trace has not for every token of step {tokens.step}."
    if not settings.adaptive or keeps_decisions(settings, own, tokens):
        return None
    if settings.scope == "lagged":
        return (
            "clipx.scope=lagged decides from an earlier rollout batch: only the run's own decisions are known. "
            "Take clipx.scope=mini_batch."
        )
    if settings.scope == "micro_batch" and not tokens.whole:
        return (
            "clipx.scope=micro_batch decides from all tokens of a micro-batch, which the trace has only at "
            "clipx.trace.fraction=1. Take clipx.scope=mini_batch."
        )
    return None


def keeps_decisions(settings: Settings, own: Settings | None, tokens: TracedTokens) -> bool:
    """Returns whether a replay takes the run's own decisions, because its traced tokens do not determine them."""
    undetermined = tokens.facts[0].decided_from is DecidedFrom.LAGGED or not tokens.whole
    return is_own(settings, own) and bool(tokens.decisions) and undetermined


def is_own(settings: Settings, own: Settings | None) -> bool:
    """Returns whether a loss is the run's own, as far as it concerns the gradient of the tokens."""
    parts = ("method", "shaping", "mask", "select", "scope")
    return own is not None and all(getattr(settings, name) == getattr(own, name) for name in parts)


def apply_to(settings: Settings, own: Settings | None, tokens: TracedTokens, batch: TokenBatch) -> LossOnTokens:
    """Returns a loss, for which `why_refused` has no reason, on all tokens of an update or a resample of them."""
    with torch.no_grad():
        unmasked, all_inputs = _masked(settings, own, batch)
        factor = _factor(settings, batch, unmasked, all_inputs.mask)
        keeps = keeps_decisions(settings, own, tokens)
        decided_apart = settings.adaptive and (settings.scope == "micro_batch" or keeps)
        numbers = batch.micro_batch.unique().tolist() if decided_apart else [None]
        parts = []
        for number in numbers:
            rows = torch.arange(len(batch.prompt)) if number is None else (batch.micro_batch == number).nonzero()[:, 0]
            inputs = Inputs(*(None if values is None else values[rows] for values in all_inputs))
            if keeps:
                decision, of_decision = tokens.decisions[number], {}
            else:
                statistics = _statistics(settings, tokens, inputs)
                decision = settings.method.decide(statistics)
                of_decision = settings.method.metrics(statistics, decision)
            parts.append((rows, *_apply(settings, inputs, factor[rows], decision, of_decision)))
        order = torch.cat([rows for rows, *_ in parts]).argsort()
        traces = zip(*(trace for _, trace, *_ in parts), strict=True)
        means = _means(settings, sum(sums for _, _, sums, _ in parts))
        for name in parts[0][3]:
            means[name] = sum(float(logged[name]) for *_, logged in parts) / len(parts)
        return LossOnTokens(TokenTrace(*(torch.cat(values)[order] for values in traces)), means, all_inputs.mask)


def _masked(settings: Settings, own: Settings | None, batch: TokenBatch) -> tuple[Tensor, Inputs]:
    """Returns the tokens before +clipx/mask, bool, (sequences, length); and what the loss gets.

    A run that has a mask and rejects in bypass mode does not tell the two apart in its trace: under another mask, what
    it rejected counts again.
    """
    inputs, of_run = batch.inputs, None if own is None else own.mask
    unmasked = inputs.mask if of_run is None else batch.whole
    if settings.mask == of_run:
        return unmasked, inputs
    inputs = inputs._replace(mask=unmasked)
    return unmasked, inputs._replace(mask=remaining(settings.mask, inputs))


def _factor(settings: Settings, batch: TokenBatch, unmasked: Tensor, mask: Tensor) -> Tensor:
    """Returns the factor on F of rollout correction and of the entropy selection, (sequences, length)."""
    factor = mask.to(torch.float32) if batch.correction is None else torch.where(mask, batch.correction, 0.0)
    if settings.select is not None:
        factor = factor * settings.select.selected(batch.inputs.entropy, unmasked, None)
    return factor


def _apply(
    settings: Settings, inputs: Inputs, factor: Tensor, decision: Tensor, of_decision: dict[str, Any]
) -> tuple[TokenTrace, Tensor, dict[str, Tensor]]:
    """Returns the tokens' trace, their sums, and the metrics of the decision as they are logged."""
    method = settings.method
    applied = apply(method, settings.shaping, inputs, decision)
    t, dual_clip = applied.tokens, method.dual_clip
    sums = token_sums(t, method.bounded(t), applied.bounds, applied.weighted, dual_clip, inputs.counted)
    logged = {f"clipx/{name}": one for _, group in declared(method, of_decision) for name, one in group.items()}
    return token_trace(method, applied, factor), sums, logged


def _statistics(settings: Settings, tokens: TracedTokens, inputs: Inputs) -> Tensor:
    """Returns the statistics of the whole update, extrapolated where the trace has only a share of its prompts."""
    at_ratio_one = tokens.facts[0].decided_from is DecidedFrom.RATIO_ONE and "entropy" not in settings.method.asks_for
    if at_ratio_one and settings.scope == "mini_batch":
        inputs = inputs._replace(log_prob=inputs.old_log_prob)
    statistics = token_statistics(settings.method, settings.shaping, inputs)
    return statistics if tokens.whole else statistics / tokens.facts[0].fraction


def _means(settings: Settings, sums: Tensor) -> dict[str, float]:
    dual_clipped = settings.method.dual_clip is not None
    totals = {key: float(value) for key, value in token_metrics(sums, dual_clipped=dual_clipped).items()}
    count = max(totals.pop(TOKENS), 1.0)
    return {key: one for key, (one,) in with_ratios_of_sums({k: [v / count] for k, v in totals.items()}).items()}
