"""A loss on traced tokens, computed by the functions that are used in training."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens, inputs_at
from verl_clipx.losses.applying.loss import apply, token_statistics
from verl_clipx.losses.applying.metrics import TOKENS, token_metrics, token_sums, with_ratios_of_sums
from verl_clipx.losses.applying.token_trace import TokenTrace, token_trace
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.base.tokens import OPTIONAL, Inputs
from verl_clipx.losses.modifiers.masks import remaining
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom


class LossOnTokens(NamedTuple):
    """A loss on each of an update's tokens, (sequences, length).

    Args:
        trace: what the loss does to each token.
        metrics: over the tokens, as logged.
        mask: the tokens that the loss trains on, bool.
    """

    trace: TokenTrace
    metrics: dict[str, float]
    mask: Tensor


def why_refused(settings: Settings, own: Settings | None, tokens: TracedTokens) -> str | None:
    """Says why a loss can't be replayed on an update's tokens; None if it can.

    Args:
        settings: those of the loss.
        own: the run's own settings; None if they are not known.
        tokens: the update's.
    """
    wanted = set(settings.asks_for)
    if settings.select is not None:
        wanted.add("entropy")
    for name in OPTIONAL:
        if name in wanted and getattr(tokens.batch.inputs, name) is None:
            method = settings.method.name
            return f"{method} needs {name}, which the trace does not have for every token of step {tokens.step}."
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
    """Returns a loss, for which `why_refused` has no reason, on the tokens of an update.

    Args:
        settings: those of the loss.
        own: the run's own settings; None if they are not known.
        tokens: the update.
        batch: all of its tokens, or a resample of them.
    """
    with torch.no_grad():
        unmasked, all_inputs = _masked(settings, own, batch)
        factor = _factor(settings, batch, unmasked, all_inputs.mask)
        keeps = keeps_decisions(settings, own, tokens)
        # The rows that share a decision, and the number of their micro-batch where each has a decision of its own.
        decided_together: list[tuple[Tensor, int | None]] = [(torch.arange(len(batch.prompt)), None)]
        if settings.adaptive and (settings.scope == "micro_batch" or keeps):
            decided_together = []
            for number in batch.micro_batch.unique().tolist():
                decided_together.append(((batch.micro_batch == number).nonzero()[:, 0], number))
        parts = []
        for rows, number in decided_together:
            inputs = inputs_at(all_inputs, rows)
            if keeps:
                decision = tokens.decisions[number]
                metrics = {}
            else:
                statistics = _statistics(settings, tokens, inputs)
                decision = settings.method.decide(statistics)
                metrics = settings.method.metrics(statistics, decision)
            parts.append(_apply(settings, inputs, factor[rows], decision, metrics))
        # Back into the order of the batch.
        order = torch.cat([rows for rows, _ in decided_together]).argsort()
        columns = zip(*[part.trace for part in parts], strict=True)
        trace = TokenTrace(*[torch.cat(of_parts)[order] for of_parts in columns])
        means = _means(settings, sum(part.sums for part in parts))
        for name in parts[0].of_decision:
            means[name] = sum(float(part.of_decision[name]) for part in parts) / len(parts)
        return LossOnTokens(trace=trace, metrics=means, mask=all_inputs.mask)


def _masked(settings: Settings, own: Settings | None, batch: TokenBatch) -> tuple[Tensor, Inputs]:
    """Returns the tokens before +clipx/mask, bool, (sequences, length); and what the loss gets.

    A run that has a mask and rejects in bypass mode does not tell the two apart in its trace: under another mask, what
    it rejected counts again.
    """
    inputs = batch.inputs
    of_run = None if own is None else own.mask
    unmasked = inputs.mask if of_run is None else batch.whole
    if settings.mask == of_run:
        return unmasked, inputs
    inputs = inputs._replace(mask=unmasked)
    return unmasked, inputs._replace(mask=remaining(settings.mask, inputs))


def _factor(settings: Settings, batch: TokenBatch, unmasked: Tensor, mask: Tensor) -> Tensor:
    """Returns the factor on F of rollout correction and of the entropy selection, (sequences, length)."""
    factor = mask.to(torch.float32)
    if batch.correction is not None:
        factor = torch.where(mask, batch.correction, 0.0)
    if settings.select is not None:
        factor = factor * settings.select.selected(batch.inputs.entropy, unmasked, None)
    return factor


class Part(NamedTuple):
    """A loss on the tokens that share a decision.

    Args:
        trace: what the loss does to each token.
        sums: over the tokens, as from `token_sums`.
        of_decision: the metrics of the decision, as they are logged.
    """

    trace: TokenTrace
    sums: Tensor
    of_decision: dict[str, Tensor]


def _apply(settings: Settings, inputs: Inputs, factor: Tensor, decision: Tensor, metrics: dict[str, Any]) -> Part:
    """Applies a loss to tokens that share a decision; `metrics` are the decision's, as the method returns them."""
    method = settings.method
    applied = apply(method, settings.shaping, inputs, decision)
    t = applied.tokens
    sums = token_sums(t, method.bounded(t), applied.bounds, applied.weighted, method.dual_clip, inputs.counted)
    of_decision = {}
    for _, members in find_declarations(method, metrics):
        for name, value in members.items():
            of_decision[f"clipx/{name}"] = value
    return Part(trace=token_trace(method, applied, factor), sums=sums, of_decision=of_decision)


def _statistics(settings: Settings, tokens: TracedTokens, inputs: Inputs) -> Tensor:
    """Returns the statistics of the whole update, extrapolated where the trace has only a share of its prompts."""
    at_ratio_one = tokens.facts[0].decided_from is DecidedFrom.RATIO_ONE and "entropy" not in settings.method.asks_for
    if at_ratio_one and settings.scope == "mini_batch":
        inputs = inputs._replace(log_prob=inputs.old_log_prob)
    statistics = token_statistics(settings.method, settings.shaping, inputs)
    if tokens.whole:
        return statistics
    return statistics / tokens.facts[0].fraction


def _means(settings: Settings, sums: Tensor) -> dict[str, float]:
    """Returns the metrics of an update, as it logs them, from the sums over its tokens."""
    totals = token_metrics(sums, dual_clipped=settings.method.dual_clip is not None)
    count = max(float(totals.pop(TOKENS)), 1.0)
    # A list of one value, because this is one update.
    of_update = {key: [float(total) / count] for key, total in totals.items()}
    return {key: mean for key, (mean,) in with_ratios_of_sums(of_update).items()}
