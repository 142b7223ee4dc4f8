"""Wraps verl's loss function, so that the policy loss knows its micro-batch and its metrics are exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.metric import AggregationType, Metric

from verl_clipx.losses.applying.metrics import SUM_KEYS, TOKENS, VERSIONS_SUM
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.metric import Over
from verl_clipx.losses.base.shared_metrics import FLOORS, OF_TOKENS, REJECTED, SELECTED
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.reports import Reports
from verl_clipx.training.worker.skipped_updates import merge_counts, not_finite_in
from verl_clipx.training.worker.step import MicroBatch, Observer, OptimizerStep, call_of, in_micro_batch


def exact_metrics(micro_batch: MicroBatch, model_output: Any, data: Any) -> dict[str, Metric]:
    """Returns metrics of a micro-batch whose aggregate over micro-batches and ranks is exact over the mini-batch.

    verl sums a SUM metric over micro-batches and averages it over data-parallel ranks. Therefore a local sum, which the
    policy loss has left, is multiplied by the number of ranks and divided by the number of tokens that count in the
    whole mini-batch.
    """
    step, dp_size = micro_batch.step, data["dp_size"]
    # Checked only if the loss is not finite, because the check waits for the accelerator.
    if not math.isfinite(micro_batch.loss):
        found = not_finite_in(data, model_output["log_probs"], micro_batch.entropy)
        step.not_finite = merge_counts(step.not_finite, found)
    tokens = data["batch_num_tokens"] if step.counted_tokens is None else step.counted_tokens
    scale = dp_size / max(tokens, 1)
    metrics = {
        name: Metric(AggregationType.SUM, total * scale)
        for name, total in micro_batch.sums.items()
        if name != TOKENS and (step.of_rollout_batch or name not in SUM_KEYS)
    }
    counts = micro_batch.counts
    if step.recut is not None:
        # It is known beforehand, and travels with the update's first micro-batch.
        metrics |= {name: Metric(AggregationType.SUM, total * scale) for name, total in step.recut.sums.items()}
        counts = counts | step.recut.bins
        step.recut = None
    metrics |= {name: Metric(AggregationType.SUM, count * dp_size) for name, count in counts.items()}
    return metrics | {name: Metric(AggregationType.MEAN, value) for name, value in micro_batch.values.items()}


# The keys of the metrics that are divided by the number of tokens that count.
MEANS = frozenset(
    [
        *(metric.key for metric in (*OF_TOKENS, SELECTED) if metric.over is Over.TOKENS),
        *(metric.key for floor in FLOORS for metric in floor.means),
        *SUM_KEYS,
        VERSIONS_SUM,
    ]
)


def over_remaining(metrics: dict[str, Any]) -> None:
    """Turns means over all tokens of an update into means over those that the loss did not reject, in place.

    The number of rejected tokens is known only after the update's last micro-batch.
    """
    if REJECTED.key not in metrics:
        return
    left = 1 - float(Metric.aggregate_dp(ranks_of(metrics[REJECTED.key])))
    for key in MEANS & metrics.keys():
        for metric in ranks_of(metrics[key]):
            metric.values = [value / left if left > 0 else value for value in metric.values]


def ranks_of(metric: Metric | list[Metric]) -> list[Metric]:
    return metric if isinstance(metric, list) else [metric]


def step_without_worker(settings: Settings | Observe, schedule: Schedule) -> OptimizerStep:
    """Makes the step of a loss call outside train_batch; RuntimeError if the run needs what train_batch decides."""
    if isinstance(settings, Observe):
        return OptimizerStep(of_rollout_batch=False)
    needing = []
    if schedule.bounds is not DecidedFrom.MICRO_BATCH:
        needing.append(f"{NODE}.scope={settings.scope}")
    if schedule.passes:
        needing.append(f"+{NODE}/update=lopti")
    if settings.needs_entropy:
        needing.append("entropy" if settings.select is None else f"+{NODE}/select")
    if needing:
        raise RuntimeError(
            f"{', '.join(needing)} under the method {settings.method.name} needs the mini-batch before its update, "
            "but this worker calls the loss outside TrainingWorker.train_batch, as verl's Tinker worker does. Train "
            f"with train_mini_batch or train_batch, or use only a method with fixed bounds (+{NODE}=grpo)."
        )
    return OptimizerStep(of_rollout_batch=False)


def with_micro_batch(
    loss_fn: Callable[..., Any],
    settings: Settings | Observe,
    schedule: Schedule,
    current_step: Callable[[], OptimizerStep | None] = OptimizerStep,
    observers: Sequence[Observer] = (),
    reports: Reports | None = None,
) -> Callable[..., Any]:
    """Wraps verl's loss function so that the policy loss sees its micro-batch and its metrics are exact.

    Under distillation verl also calls it as (student_logits, data, ...) -> a dictionary of tensors; such calls pass
    through. `schedule` is the run's. `current_step` returns None outside an optimizer step. `reports` are the worker's.
    """

    def wrapped(model_output: Any = None, data: Any = None, dp_group: Any = None, **of_logits: Any) -> Any:
        if of_logits:
            return loss_fn(data=data, **of_logits)
        step = current_step() or step_without_worker(settings, schedule)
        call = call_of(settings, step, model_output, data)
        micro_batch, output, restricted = call
        if reports is not None:
            micro_batch.observing = reports.metrics
        with in_micro_batch(micro_batch):
            loss, metrics = loss_fn(model_output=output, data=restricted, dp_group=dp_group)
        own = micro_batch.observing.run(lambda: exact_metrics(*call), {})
        metrics |= own | (reports.of_rank(own) if reports is not None and step.of_rollout_batch else {})
        for observer in observers if step.of_rollout_batch else ():
            observer.end_micro_batch(micro_batch, loss, model_output, data, dp_group)
        return loss, metrics

    return wrapped
