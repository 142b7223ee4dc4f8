"""A loss on traced tokens, computed by the functions that are used in training."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens, inputs_at
from verl_clipx.losses.applying.loss import apply, token_statistics
from verl_clipx.losses.applying.metrics import TOKENS, replace_sums_with_metrics, token_metrics, token_sums
from verl_clipx.losses.applying.token_trace import TokenTrace, token_trace
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.base.tokens import OPTIONAL, Inputs
from verl_clipx.losses.modifiers.masks import apply_mask_rule
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom


class LossOnTokens(NamedTuple):
    """A loss on each of an update's tokens.

    Args:
        trace: what the loss does to each token, (sequences, length).
        metrics: the metrics over the tokens, by the keys under which training logs them.
        mask: the tokens that the loss trains on, bool, (sequences, length).
    """

    trace: TokenTrace
    metrics: dict[str, float]
    mask: Tensor


def why_refused(settings: Settings, run_settings: Settings | None, tokens: TracedTokens) -> str | None:
    """Say why a loss cannot be replayed on an update's tokens; None if it can.

    Args:
        settings: the settings of the loss.
        run_settings: the settings that the run trained with; None if they are not known.
        tokens: the update.
    """
    needed = set(settings.asks_for)
    if settings.select is not None:
        needed.add("entropy")
    for name in OPTIONAL:
        if name in needed and getattr(tokens.batch.inputs, name) is None:
            method = settings.method.name
            return f"{method} needs {name}, which the trace does not have for every token of step {tokens.step}."
    if not settings.adaptive or keeps_decisions(settings, run_settings, tokens):
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


def keeps_decisions(settings: Settings, run_settings: Settings | None, tokens: TracedTokens) -> bool:
    """Return whether a replay takes the decisions that the run made, since they cannot be made anew.

    It takes them if the loss is the run's own and the trace lacks tokens that the run decided from: only a share of the
    tokens is traced, or the run decided from an earlier rollout batch.
    """
    can_decide_anew = tokens.whole and tokens.facts[0].decided_from is not DecidedFrom.LAGGED
    return is_run_loss(settings, run_settings) and bool(tokens.decisions) and not can_decide_anew


def is_run_loss(settings: Settings, run_settings: Settings | None) -> bool:
    """Return whether a loss gives the tokens the same gradient as the loss that the run trained with."""
    if run_settings is None:
        return False
    parts = ("method", "shaping", "mask", "select", "scope")
    return all(getattr(settings, name) == getattr(run_settings, name) for name in parts)


class DecisionGroup(NamedTuple):
    """Sequences for which one decision is made.

    Args:
        rows: their indices in the batch, int64.
        micro_batch: the number of their micro-batch; None if they are the whole batch.
    """

    rows: Tensor
    micro_batch: int | None


def apply_to(
    settings: Settings, run_settings: Settings | None, tokens: TracedTokens, batch: TokenBatch
) -> LossOnTokens:
    """Return what a loss does to the tokens of an update; `why_refused` must have returned None for them.

    Args:
        settings: the settings of the loss.
        run_settings: the settings that the run trained with; None if they are not known.
        tokens: the update.
        batch: all sequences of the update, or a resample of them.
    """
    with torch.no_grad():
        mask_before = _mask_before_modifier(run_settings, batch)
        all_inputs = _inputs_under_mask(settings, run_settings, batch, mask_before)
        factor = _factor_on_weight(settings, batch, mask_before, all_inputs.mask)
        keeps = keeps_decisions(settings, run_settings, tokens)
        groups = _group_by_decision(settings, batch, keeps=keeps)
        parts: list[Part] = []
        for group in groups:
            inputs = inputs_at(all_inputs, group.rows)
            if keeps:
                decision = tokens.decisions[group.micro_batch]
                decision_metrics = {}
            else:
                statistics = _compute_statistics(settings, tokens, inputs)
                decision = settings.method.decide(statistics)
                decision_metrics = settings.method.metrics(statistics, decision)
            parts.append(_apply_decision(settings, inputs, factor[group.rows], decision, decision_metrics))
        metrics = _metrics_of_sums(settings, sum(part.sums for part in parts))
        for name in parts[0].decision_metrics:
            metrics[name] = sum(float(part.decision_metrics[name]) for part in parts) / len(parts)
        return LossOnTokens(trace=_join_traces(groups, parts), metrics=metrics, mask=all_inputs.mask)


def _mask_before_modifier(run_settings: Settings | None, batch: TokenBatch) -> Tensor:
    """Return the mask as it was before the run's +clipx/mask took tokens out: bool, (sequences, length).

    The trace marks the tokens that +clipx/mask took out in the same way as those that bypass mode rejected. Where the
    run had a +clipx/mask, both kinds are therefore in the returned mask. Without one, or if the run's settings are not
    known, the marked tokens stay out.
    """
    run_has_modifier = run_settings is not None and run_settings.mask is not None
    if run_has_modifier:
        return batch.traced_mask
    return batch.inputs.mask


def _inputs_under_mask(
    settings: Settings, run_settings: Settings | None, batch: TokenBatch, mask_before: Tensor
) -> Inputs:
    """Return what the loss gets: the traced inputs, with the tokens that its own +clipx/mask leaves.

    Args:
        settings, run_settings, batch: as for `apply_to`.
        mask_before: from `_mask_before_modifier`.
    """
    run_modifier = None if run_settings is None else run_settings.mask
    if settings.mask == run_modifier:
        return batch.inputs
    inputs_before = batch.inputs._replace(mask=mask_before)
    return inputs_before._replace(mask=apply_mask_rule(settings.mask, inputs_before))


def _factor_on_weight(settings: Settings, batch: TokenBatch, mask_before: Tensor, mask: Tensor) -> Tensor:
    """Return the factor by which rollout correction and the entropy selection multiply F.

    It is (sequences, length), float32, and 0 outside the mask.

    Args:
        settings, batch: as for `apply_to`.
        mask_before: the tokens from which the entropy selection selects, bool, (sequences, length).
        mask: the tokens that the loss trains on, bool, (sequences, length).
    """
    factor = mask.to(torch.float32)
    if batch.correction is not None:
        factor = torch.where(mask, batch.correction, 0.0)
    if settings.select is not None:
        factor = factor * settings.select.selected(batch.inputs.entropy, mask_before, None)
    return factor


def _group_by_decision(settings: Settings, batch: TokenBatch, *, keeps: bool) -> list[DecisionGroup]:
    """Group the sequences by the decision that applies to them: one for each micro-batch, or one for all.

    Args:
        settings, batch: as for `apply_to`.
        keeps: whether the run's own decisions are taken. The trace has one for each micro-batch.
    """
    by_micro_batch = settings.adaptive and (settings.scope == "micro_batch" or keeps)
    if not by_micro_batch:
        return [DecisionGroup(rows=torch.arange(len(batch.prompt)), micro_batch=None)]
    groups: list[DecisionGroup] = []
    for number in batch.micro_batch.unique().tolist():
        rows = (batch.micro_batch == number).nonzero()[:, 0]
        groups.append(DecisionGroup(rows=rows, micro_batch=number))
    return groups


class Part(NamedTuple):
    """What a loss does to the tokens that share a decision.

    Args:
        trace: what it does to each token.
        sums: sums over the tokens, as from `token_sums`.
        decision_metrics: the metrics of the decision, by the keys under which they are logged.
    """

    trace: TokenTrace
    sums: Tensor
    decision_metrics: dict[str, Tensor]


def _apply_decision(
    settings: Settings, inputs: Inputs, factor: Tensor, decision: Tensor, decision_metrics: dict[str, Any]
) -> Part:
    """Apply a loss to tokens that share a decision.

    Args:
        settings: the settings of the loss.
        inputs: what the loss gets, (sequences, length).
        factor: from `_factor_on_weight`, (sequences, length).
        decision: what the method decided.
        decision_metrics: the decision's metrics, as the method returns them.
    """
    method = settings.method
    applied = apply(method, settings.shaping, inputs, decision)
    tokens = applied.tokens
    sums = token_sums(
        tokens, method.bounded(tokens), applied.bounds, applied.weighted, method.dual_clip, inputs.counted
    )
    logged: dict[str, Tensor] = {}
    for _, members in find_declarations(method, decision_metrics):
        for name, value in members.items():
            logged[f"clipx/{name}"] = value
    return Part(trace=token_trace(method, applied, factor), sums=sums, decision_metrics=logged)


def _join_traces(groups: list[DecisionGroup], parts: list[Part]) -> TokenTrace:
    """Return what the loss does to each token of the batch, in the batch's order, from the parts of its groups."""
    order = torch.cat([group.rows for group in groups]).argsort()
    fields: dict[str, Tensor] = {}
    for name in TokenTrace._fields:
        fields[name] = torch.cat([getattr(part.trace, name) for part in parts])[order]
    return TokenTrace(**fields)


def _compute_statistics(settings: Settings, tokens: TracedTokens, inputs: Inputs) -> Tensor:
    """Return the statistics that a method decides from.

    They are sums over tokens. Where the trace has only a share of the update's prompts, the sums are divided by this
    share, which estimates the sums over all prompts.

    Args:
        settings: the settings of the loss.
        tokens: the update.
        inputs: the inputs of those of its tokens that the decision is made from.
    """
    if _decides_at_ratio_one(settings, tokens):
        inputs = inputs._replace(log_prob=inputs.old_log_prob)
    statistics = token_statistics(settings.method, settings.shaping, inputs)
    if tokens.whole:
        return statistics
    return statistics / tokens.facts[0].fraction


def _decides_at_ratio_one(settings: Settings, tokens: TracedTokens) -> bool:
    """Return whether training would decide as if the current log-probabilities were the old ones.

    If the run decided so in this update, so would another loss with scope=mini_batch, unless its method reads the
    entropy. The entropy of the current policy takes a forward pass, which gives the current log-probabilities too.
    """
    run_decided_at_ratio_one = tokens.facts[0].decided_from is DecidedFrom.RATIO_ONE
    reads_entropy = "entropy" in settings.method.asks_for
    return run_decided_at_ratio_one and settings.scope == "mini_batch" and not reads_entropy


def _metrics_of_sums(settings: Settings, sums: Tensor) -> dict[str, float]:
    """Return the metrics of an update from the sums over its tokens, by the keys under which training logs them."""
    totals = token_metrics(sums, dual_clipped=settings.method.dual_clip is not None)
    count = max(float(totals.pop(TOKENS)), 1.0)
    # Each metric has a list with a value for each update, and this is one update.
    values_by_key = {key: [float(total) / count] for key, total in totals.items()}
    return {key: values[0] for key, values in replace_sums_with_metrics(values_by_key).items()}
