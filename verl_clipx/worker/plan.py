"""Plans an optimizer step: where the statistics behind its bounds come from, and what the ranks sum up beforehand.

They come from a pass over the mini-batch, from an earlier rollout batch (lagged), or each micro-batch decides from its
own. Everything that ranks have to agree on goes through one all-reduce per step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.modifiers.lopti import probability_quantile, probability_statistics
from verl_clipx.modifiers.masks import remaining
from verl_clipx.run.config import Observe, Settings
from verl_clipx.worker.layout import TokenPass, pad_rows
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import rejection_of, rejects_before
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import FIRST, OptimizerStep, RolloutBatch, micro_batch_of

# Sums a float64 vector over the data-parallel ranks.
AllReduce = Callable[[Tensor], Tensor]


def token_passes(settings: Settings | Observe, data: Any, all_reduce: AllReduce) -> list[TokenPass | None]:
    """The passes over this rank's rollout batch: those of Lopti, or a single one over all tokens, which is None."""
    update = None if isinstance(settings, Observe) else settings.update
    if update is None:
        return [None]
    eta: float | Tensor = update.eta
    if update.quantile is not None:
        local = probability_statistics(pad_rows(data["old_log_probs"]), pad_rows(data["response_mask"]))
        eta = float(probability_quantile(all_reduce(local), portion=update.quantile))
    return [TokenPass(name, eta, update.equal) for name in update.passes]


def plan_step(
    policy_loss: Any,
    state: ControllerState,
    batch: RolloutBatch,
    data: Any,
    *,
    extra_pass: Callable[[Any, OptimizerStep, list[Inputs]], dict[str, Tensor]],
    all_reduce: AllReduce,
) -> OptimizerStep:
    """Decides an optimizer step's bounds, and what else its micro-batches need.

    Args:
        state: what earlier steps left; gets the statistics that waited for this step's all-reduce.
        batch, data: the rollout batch, at this step; this rank's mini-batch.
        extra_pass: runs the extra pass, without gradient, over a mini-batch; returns this rank's sums by name.
    """
    settings = policy_loss.clipx
    step = OptimizerStep(batch.token_pass, decided_from=source_of_bounds(policy_loss, state, batch.position))
    sums, seen = token_counts(policy_loss, batch.token_pass, data), []
    if step.decided_from is DecidedFrom.RATIO_ONE:
        seen.append(inputs_at_ratio_one(settings, step, data))
        own = settings.functions(seen[0].mask.device).statistics(seen[0])
        sums["statistics"] = own[: settings.method.statistics_size]
    if step.decided_from is DecidedFrom.MINI_BATCH or passes_for_selection(policy_loss):
        sums |= extra_pass(data, step, seen)
    if state.waiting is not None:
        sums["waiting"] = state.waiting[1]
    totals = sum_over_ranks(sums, all_reduce)
    if "statistics" in totals and settings.method.second_statistics_size:
        totals["statistics"] = with_second_stage(settings, totals["statistics"], seen, all_reduce)
    state.remember(totals.get("waiting"), average=settings.lagged_average)
    lagged = state.statistics[batch.position] if step.decided_from is DecidedFrom.LAGGED else None
    decide(step, settings, totals, lagged)
    if settings.adaptive and settings.scope == "lagged":
        step.collected = []
    return step


def plan_observed_step(policy_loss: Any, data: Any, *, all_reduce: AllReduce) -> OptimizerStep:
    """A step under +clipx=observe, of which only the number of tokens may have to be known."""
    step = OptimizerStep()
    totals = sum_over_ranks(token_counts(policy_loss, None, data), all_reduce)
    step.counted_tokens = float(totals["counted"]) if totals else None
    return step


def finish_step(settings: Settings, state: ControllerState, step: OptimizerStep, position: str) -> None:
    """Ends a step. If the optimizer took it, lagged statistics wait for the next step's all-reduce."""
    if not step.taken:
        return
    state.step += 1
    if step.collected and settings.scope == "lagged":
        state.waiting = position, step.statistics_of_training


def source_of_bounds(policy_loss: Any, state: ControllerState, position: str) -> DecidedFrom:
    """The tokens that the bounds of the update at a position are decided from."""
    settings = policy_loss.clipx
    if not settings.adaptive or settings.scope == "micro_batch":
        return DecidedFrom.MICRO_BATCH
    if settings.scope == "lagged" and state.knows(position):
        return DecidedFrom.LAGGED
    # verl may fill up a rollout batch to more updates than the configuration gives: only the first is at ratio 1.
    first = policy_loss.run.makes_one_update and settings.update is None and position == FIRST.position
    # Without a forward pass the current policy's entropy is unknown. A pass that is made anyway is used.
    at_ratio_one = settings.scope == "lagged" or (first and not settings.selects_over_mini_batch)
    needs_entropy = "entropy" in settings.method.asks_for
    return DecidedFrom.RATIO_ONE if at_ratio_one and not needs_entropy else DecidedFrom.MINI_BATCH


def passes_for_selection(policy_loss: Any) -> bool:
    """Whether every step needs the extra pass for its selection.

    A selection over the mini-batch needs its threshold. Where the loss rejects by the current weights, the number of
    tokens that a selection within each sequence keeps is known only from a pass.
    """
    select = policy_loss.clipx.select
    return select is not None and (select.over == "mini_batch" or bool(rejection_of(policy_loss).criteria))


def token_counts(policy_loss: Any, token_pass: TokenPass | None, data: Any) -> dict[str, Tensor]:
    """This rank's numbers of tokens, where verl's own number is not the one that the loss uses."""
    select = None if isinstance(policy_loss.clipx, Observe) else policy_loss.clipx.select
    sums = {}
    if token_pass is not None:
        sums["counted"] = token_pass.tokens(data).sum(dtype=torch.float64)[None]
    elif rejects_before(policy_loss):
        sums["counted"] = pad_rows(data["response_mask"]).sum(dtype=torch.float64)[None]
    if select is not None and not passes_for_selection(policy_loss):
        sums["selected"] = select.counts(pad_rows(data["response_mask"])).sum(dtype=torch.float64)[None]
    return sums


def with_second_stage(settings: Settings, first: Tensor, seen: list[Inputs], all_reduce: AllReduce) -> Tensor:
    """The statistics of both stages over all ranks, float64, by another all-reduce.

    Args:
        first: the first stage's total.
        seen: the tokens of this rank's micro-batches.
    """
    method = settings.method
    own = torch.zeros(method.second_statistics_size, dtype=torch.float64, device=first.device)
    for inputs in seen:
        own += settings.functions(inputs.mask.device).statistics(inputs, first)[method.statistics_size :]
    return torch.cat([first, all_reduce(own)])


def inputs_at_ratio_one(settings: Settings, step: OptimizerStep, data: Any) -> Inputs:
    """The tokens of this rank's mini-batch with the current log-probabilities taken to be the old ones."""
    old = pad_rows(data["old_log_probs"])
    known, mask = micro_batch_of(settings, step, data), pad_rows(data["response_mask"]).bool()
    advantages = pad_rows(data["advantages"])
    inputs = inputs_of(settings, known, log_prob=old, old_log_prob=old, advantages=advantages, mask=mask)
    return inputs._replace(mask=remaining(settings.mask, inputs))


def decide(step: OptimizerStep, settings: Settings, totals: dict[str, Tensor], lagged: Tensor | None) -> None:
    """Fills in what the sums over all ranks determine of a step; `lagged`: statistics of an earlier rollout batch."""
    if "counted" in totals:
        step.counted_tokens = float(totals["counted"])
    if "selected" in totals:
        step.selected_tokens = totals["selected"].squeeze(0)
    if "entropies" in totals:
        step.entropy_bucket, step.selected_tokens = settings.select.threshold(totals["entropies"])
    step.statistics = totals.get("statistics", lagged)
    if step.statistics is not None:
        step.decision = settings.method.decide(step.statistics)


def sum_over_ranks(sums: dict[str, Tensor], all_reduce: AllReduce) -> dict[str, Tensor]:
    """The sums of each vector over the ranks, by one all-reduce; none if there are no vectors."""
    if not sums:
        return {}
    device = next((part.device for part in sums.values() if part.device.type != "cpu"), torch.device("cpu"))
    total = all_reduce(torch.cat([part.to(device) for part in sums.values()]))
    return dict(zip(sums, total.split([len(part) for part in sums.values()]), strict=True))
