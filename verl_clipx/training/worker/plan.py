"""Plans an optimizer step: where the statistics behind its bounds come from, and what the ranks sum up beforehand.

They come from a pass over the mini-batch, from an earlier rollout batch (lagged), or each micro-batch decides from its
own. Everything that ranks have to agree on goes through one all-reduce per step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.training.worker.layout import TokenPass, pad_rows
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import OptimizerStep, RolloutBatch, inputs_of, micro_batch_of

# Sums a float64 vector over the data-parallel ranks.
AllReduce = Callable[[Tensor], Tensor]


def token_passes(policy_loss: Any) -> list[TokenPass | None]:
    """Returns the passes over a rollout batch: Lopti's, or a single one over all tokens, which is None."""
    passes = policy_loss.run.record.schedule.passes
    if not passes:
        return [None]
    lopti = policy_loss.clipx.update
    return [TokenPass(name=name, eta=lopti.eta, equal=lopti.equal) for name in passes]


def plan_step(
    policy_loss: Any,
    state: ControllerState,
    batch: RolloutBatch,
    data: Any,
    *,
    extra_pass: Callable[[Any, OptimizerStep, list[Inputs]], dict[str, Tensor]],
    all_reduce: AllReduce,
) -> OptimizerStep:
    """Decides an optimizer step's bounds, and what else its micro-batches need; +clipx=observe has no bounds.

    Args:
        state: what earlier steps left; gets the statistics that waited for this step's all-reduce.
        batch, data: the rollout batch, at this step; this rank's mini-batch.
        extra_pass: runs the extra pass, without gradient, over a mini-batch; returns this rank's sums by name.
    """
    settings = policy_loss.clipx
    schedule = policy_loss.run.record.schedule
    past = state.knows(batch.position)
    step = OptimizerStep(batch.token_pass, decided_from=schedule.decided_from(batch.position, past=past))
    sums = token_counts(policy_loss, batch.token_pass, data)
    seen_inputs = []
    if step.decided_from is DecidedFrom.RATIO_ONE:
        seen_inputs.append(inputs_at_ratio_one(settings, step, data))
        of_this_rank = settings.functions(seen_inputs[0].mask.device).statistics(seen_inputs[0])
        sums["statistics"] = of_this_rank[: settings.method.statistics_size]
    if schedule.makes_extra_pass(batch.position, past=past):
        sums |= extra_pass(data, step, seen_inputs)
    if state.waiting is not None:
        sums["waiting"] = state.waiting.of_this_rank
    totals = sum_over_ranks(sums, all_reduce)
    if "statistics" in totals and settings.method.second_statistics_size:
        totals["statistics"] = with_second_stage(settings, totals["statistics"], seen_inputs, all_reduce)
    state.keep_waiting(totals.get("waiting"))
    if "counted" in totals:
        step.counted_tokens = float(totals["counted"])
    if "selected" in totals:
        step.selected_tokens = totals["selected"].squeeze(0)
    if "entropies" in totals:
        step.entropy_bucket, step.selected_tokens = settings.select.threshold(totals["entropies"])
    lagged = state.statistics[batch.position] if step.decided_from is DecidedFrom.LAGGED else None
    step.statistics = totals.get("statistics", lagged)
    if step.statistics is not None:
        step.decision = settings.method.decide(step.statistics)
    if schedule.bounds is DecidedFrom.LAGGED:
        step.collected = []
    return step


def token_counts(policy_loss: Any, token_pass: TokenPass | None, data: Any) -> dict[str, Tensor]:
    """Returns this rank's numbers of tokens, where verl's own number is not the one that the loss uses."""
    mask = pad_rows(data["response_mask"])
    of_loss = mask if token_pass is None else token_pass.tokens(data)
    counts = {
        "counted": lambda: of_loss,
        "selected": lambda: policy_loss.clipx.select.kept_counts(mask),
    }
    return {name: counts[name]().sum(dtype=torch.float64)[None] for name in policy_loss.run.record.schedule.counts}


def with_second_stage(settings: Settings, first: Tensor, seen_inputs: list[Inputs], all_reduce: AllReduce) -> Tensor:
    """Returns the statistics of both stages over all ranks, float64, by another all-reduce.

    Args:
        first: the first stage's total.
        seen: the tokens of this rank's micro-batches.
    """
    method = settings.method
    of_this_rank = torch.zeros(method.second_statistics_size, dtype=torch.float64, device=first.device)
    for inputs in seen_inputs:
        of_this_rank += settings.functions(inputs.mask.device).statistics(inputs, first)[method.statistics_size :]
    return torch.cat([first, all_reduce(of_this_rank)])


def inputs_at_ratio_one(settings: Settings, step: OptimizerStep, data: Any) -> Inputs:
    """Returns the tokens of this rank's mini-batch with the current log-probabilities taken to be the old ones."""
    old = pad_rows(data["old_log_probs"])
    micro_batch = micro_batch_of(settings, step, data)
    mask = pad_rows(data["response_mask"]).bool()
    advantages = pad_rows(data["advantages"])
    return inputs_of(settings, micro_batch, log_prob=old, old_log_prob=old, advantages=advantages, mask=mask)


def sum_over_ranks(sums: dict[str, Tensor], all_reduce: AllReduce) -> dict[str, Tensor]:
    """Sums each vector over the ranks, by one all-reduce; none if there are no vectors."""
    if not sums:
        return {}
    device = next((part.device for part in sums.values() if part.device.type != "cpu"), torch.device("cpu"))
    total = all_reduce(torch.cat([part.to(device) for part in sums.values()]))
    return dict(zip(sums, total.split([len(part) for part in sums.values()]), strict=True))
