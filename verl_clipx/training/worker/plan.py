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
    """Return the passes over a rollout batch: Lopti's, or a single one over all tokens, which is None."""
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
    """Decide an optimizer step's bounds, and what else its micro-batches need; +clipx=observe has no bounds.

    Args:
        policy_loss: verl's policy-loss node with the clipx node and the run.
        state: what earlier steps left. It gets the statistics that waited for this step's all-reduce.
        batch: the rollout batch, at this step.
        data: this rank's mini-batch.
        extra_pass: runs the extra pass, without gradient, over a mini-batch; returns this rank's sums by name, and
            appends the tokens of each micro-batch to its last argument.
        all_reduce: sums a float64 vector over the data-parallel ranks.
    """
    settings = policy_loss.clipx
    schedule = policy_loss.run.record.schedule
    has_past = state.knows(batch.position)
    step = OptimizerStep(batch.token_pass, decided_from=schedule.decided_from(batch.position, past=has_past))
    sums = count_tokens(policy_loss, batch.token_pass, data)
    # The tokens from which statistics were made, for a second stage.
    seen_inputs: list[Inputs] = []
    if step.decided_from is DecidedFrom.RATIO_ONE:
        inputs = inputs_at_ratio_one(settings, step, data)
        seen_inputs.append(inputs)
        statistics_of_rank = settings.functions(inputs.mask.device).statistics(inputs)
        sums["statistics"] = statistics_of_rank[: settings.method.statistics_size]
    if schedule.makes_extra_pass(batch.position, past=has_past):
        sums |= extra_pass(data, step, seen_inputs)
    if state.waiting is not None:
        sums["waiting"] = state.waiting.of_this_rank
    totals = sum_over_ranks(sums, all_reduce)
    if "statistics" in totals and settings.method.second_statistics_size:
        totals["statistics"] = with_second_stage(settings, totals["statistics"], seen_inputs, all_reduce)
    state.keep_waiting(totals.get("waiting"))
    keep_token_numbers(step, settings, totals)
    if "statistics" in totals:
        step.statistics = totals["statistics"]
    elif step.decided_from is DecidedFrom.LAGGED:
        step.statistics = state.statistics[batch.position]
    if step.statistics is not None:
        step.decision = settings.method.decide(step.statistics)
    if schedule.bounds is DecidedFrom.LAGGED:
        step.collected = []
    return step


def keep_token_numbers(step: OptimizerStep, settings: Settings, totals: dict[str, Tensor]) -> None:
    """Keep in a step how many tokens count and are selected, and where a selection over the mini-batch ends.

    Args:
        step: the step that is planned.
        settings: the run's.
        totals: what the ranks summed, by name.
    """
    if "counted" in totals:
        step.counted_tokens = float(totals["counted"])
    if "selected" in totals:
        step.selected_tokens = totals["selected"].squeeze(0)
    if "entropies" in totals:
        last_kept = settings.select.threshold(totals["entropies"])
        step.entropy_bucket = last_kept.index
        step.selected_tokens = last_kept.count


def count_tokens(policy_loss: Any, token_pass: TokenPass | None, data: Any) -> dict[str, Tensor]:
    """Count this rank's tokens where verl's own number is not the one that the loss divides by.

    Args:
        policy_loss: as for `plan_step`; its run's schedule names the counts that are needed.
        token_pass: Lopti's; None: all tokens are trained.
        data: this rank's mini-batch.

    Returns:
        "counted", the tokens of the pass, and "selected", those that entropy selection keeps, as far as needed: (1,),
        float64.
    """
    mask = pad_rows(data["response_mask"])
    names = policy_loss.run.record.schedule.counts
    counts = {}
    if "counted" in names:
        is_counted = mask if token_pass is None else token_pass.tokens(data)
        counts["counted"] = is_counted.sum(dtype=torch.float64)[None]
    if "selected" in names:
        counts["selected"] = policy_loss.clipx.select.kept_counts(mask).sum(dtype=torch.float64)[None]
    return counts


def with_second_stage(settings: Settings, first: Tensor, seen_inputs: list[Inputs], all_reduce: AllReduce) -> Tensor:
    """Return the statistics of both stages over all ranks, float64, by another all-reduce.

    Args:
        settings: the run's.
        first: the first stage's total over all ranks.
        seen_inputs: the tokens of this rank's micro-batches.
        all_reduce: sums a float64 vector over the data-parallel ranks.
    """
    method = settings.method
    second_of_rank = torch.zeros(method.second_statistics_size, dtype=torch.float64, device=first.device)
    for inputs in seen_inputs:
        statistics = settings.functions(inputs.mask.device).statistics(inputs, first)
        second_of_rank += statistics[method.statistics_size :]
    return torch.cat([first, all_reduce(second_of_rank)])


def inputs_at_ratio_one(settings: Settings, step: OptimizerStep, data: Any) -> Inputs:
    """Return the tokens of this rank's mini-batch, with the old log-probabilities as the current ones."""
    old = pad_rows(data["old_log_probs"])
    micro_batch = micro_batch_of(settings, step, data)
    mask = pad_rows(data["response_mask"]).bool()
    advantages = pad_rows(data["advantages"])
    return inputs_of(settings, micro_batch, log_prob=old, old_log_prob=old, advantages=advantages, mask=mask)


def sum_over_ranks(sums: dict[str, Tensor], all_reduce: AllReduce) -> dict[str, Tensor]:
    """Sum each vector over the ranks, all by one all-reduce, or by none if there are no vectors.

    Args:
        sums: this rank's float64 vectors by name; every rank has the same names and lengths.
        all_reduce: sums a float64 vector over the data-parallel ranks.

    Returns:
        The totals by name, on the accelerator if any of the vectors is on it.
    """
    if not sums:
        return {}
    devices = [vector.device for vector in sums.values() if vector.device.type != "cpu"]
    device = devices[0] if devices else torch.device("cpu")
    joined = torch.cat([vector.to(device) for vector in sums.values()])
    totals = all_reduce(joined).split([len(vector) for vector in sums.values()])
    return dict(zip(sums, totals, strict=True))
