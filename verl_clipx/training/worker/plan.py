"""Plans an optimizer step: where the statistics behind its bounds come from, and what the ranks sum up beforehand.

The statistics come from the mini-batch at ratio 1, from an extra pass over the mini-batch, from an earlier rollout
batch (lagged), or from each micro-batch by itself. Everything that ranks have to agree on goes through one all-reduce
per step. Only the second stage of a method whose statistics have two takes another one.
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
    """Return Lopti's passes over a rollout batch; without Lopti [None], which stands for one pass over all tokens."""
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
    extra_pass: Callable[[Any, OptimizerStep, list[Inputs]], dict[str, Tensor]] | None,
    all_reduce: AllReduce,
) -> OptimizerStep:
    """Plan an optimizer step: count its tokens over all ranks, and decide its bounds.

    Under +clipx=observe there are no bounds to decide.

    Args:
        policy_loss: verl's policy-loss node with the clipx node and the run.
        state: what earlier steps left. The statistics that the previous step left waiting in it are summed over the
            ranks here, and kept in it.
        batch: the rollout batch that the step belongs to. Its position is that of this step.
        data: this rank's mini-batch.
        extra_pass: runs the extra pass, without gradient, over a mini-batch; returns this rank's sums by name, and
            appends the tokens of each micro-batch to its last argument. None if no step of the run needs it.
        all_reduce: sums a float64 vector over the data-parallel ranks.
    """
    settings = policy_loss.clipx
    schedule = policy_loss.run.record.schedule
    has_past = state.knows(batch.position)
    step = OptimizerStep(token_pass=batch.token_pass, decided_from=schedule.decided_from(batch.position, past=has_past))
    sums = count_tokens(policy_loss, batch.token_pass, data)
    # The tokens from which statistics were made. A second stage, which needs the first one's sum over all ranks, goes
    # over them again.
    seen_inputs: list[Inputs] = []
    if step.decided_from is DecidedFrom.RATIO_ONE:
        inputs = inputs_at_ratio_one(settings, step, data)
        seen_inputs.append(inputs)
        statistics_of_rank = settings.functions(inputs.mask.device).statistics(inputs)
        # The first stage alone.
        sums["statistics"] = statistics_of_rank[: settings.method.statistics_size]
    if schedule.makes_extra_pass(batch.position, past=has_past):
        # Its counts replace those of `count_tokens`: the pass has seen which tokens the loss will reject.
        sums |= extra_pass(data, step, seen_inputs)
    if state.waiting is not None:
        sums["waiting"] = state.waiting.of_this_rank
    totals = sum_over_ranks(sums, all_reduce)
    if "statistics" in totals and settings.method.second_statistics_size:
        totals["statistics"] = with_second_stage(settings, totals["statistics"], seen_inputs, all_reduce)
    # Before `state.statistics` is read, because those that waited may be the ones that this step needs.
    state.keep_waiting(totals.get("waiting"))
    store_token_counts(step, settings, totals)
    if "statistics" in totals:
        step.statistics = totals["statistics"]
    elif step.decided_from is DecidedFrom.LAGGED:
        step.statistics = state.statistics[batch.position]
    if step.statistics is not None:
        step.decision = settings.method.decide(step.statistics)
    if schedule.bounds is DecidedFrom.LAGGED:
        step.collected = []
    return step


def store_token_counts(step: OptimizerStep, settings: Settings, totals: dict[str, Tensor]) -> None:
    """Store in a step the numbers of its counted and selected tokens, and the last bucket that a selection keeps.

    Args:
        step: the step that is planned.
        settings: the run's.
        totals: the ranks' sums by name, float64: "counted" and "selected", (1,), and "entropies", the histogram,
            (ENTROPY_BUCKETS,). For each that is missing, nothing is stored.
    """
    if "counted" in totals:
        # A float, because the metrics are divided by it on the host.
        step.counted_tokens = float(totals["counted"])
    if "selected" in totals:
        # A tensor, because the loss divides by it on the accelerator.
        step.selected_tokens = totals["selected"].squeeze(0)
    if "entropies" in totals:
        reached = settings.select.find_last_kept_bucket(totals["entropies"])
        step.entropy_bucket = reached.index
        # All tokens that are kept, and not only those of the last bucket.
        step.selected_tokens = reached.count


def count_tokens(policy_loss: Any, token_pass: TokenPass | None, data: Any) -> dict[str, Tensor]:
    """Count those tokens of this rank of which verl gives no suitable number: the loss divides by another one.

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
