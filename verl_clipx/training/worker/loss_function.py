"""Wraps verl's loss function, so that the policy loss knows its micro-batch and its metrics are exact."""

import math
from collections.abc import Callable
from typing import Any

from verl.utils.metric import AggregationType, Metric

from verl_clipx.losses.applying.metrics import AGE_KEY_BY_SUM_KEY, SUM_NAME_BY_KEY, TOKENS
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.metric import Over
from verl_clipx.losses.base.shared_metrics import FLOORS, REJECTED, SELECTED, TOKEN_METRICS
from verl_clipx.losses.groups import swap_by
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.observers import METRICS, RankObservers
from verl_clipx.training.worker.skipped_updates import merge_counts, not_finite_in
from verl_clipx.training.worker.step import MicroBatch, OptimizerStep, in_micro_batch, prepare_call


def exact_metrics(micro_batch: MicroBatch, model_output: Any, data: Any) -> dict[str, Metric]:
    """Make the metrics of a micro-batch such that verl's aggregate over micro-batches and ranks is exact.

    verl sums a SUM metric over micro-batches and averages it over data-parallel ranks. Therefore a sum over this
    micro-batch is multiplied by the number of ranks, and for a mean divided by the number of tokens that count in the
    whole mini-batch.

    Args:
        micro_batch: with the sums, counts and values that the policy loss has left in it.
        model_output: verl's, with the log-probabilities.
        data: verl's data of the micro-batch.
    """
    step = micro_batch.step
    dp_size = data["dp_size"]
    # Checked only if the loss is not finite, because the check waits for the accelerator.
    if not math.isfinite(micro_batch.loss):
        newly_not_finite = not_finite_in(data, model_output["log_probs"], micro_batch.entropy)
        step.not_finite = merge_counts(step.not_finite, newly_not_finite)
    tokens = data["batch_num_tokens"] if step.counted_tokens is None else step.counted_tokens
    scale = dp_size / max(tokens, 1)
    metrics = {}
    for name, total in micro_batch.sums.items():
        # Outside a rollout batch nothing makes ratios of sums, so that these sums would be logged as they are.
        is_logged = step.of_rollout_batch or name not in SUM_NAME_BY_KEY
        if name != TOKENS and is_logged:
            metrics[name] = Metric(AggregationType.SUM, total * scale)
    counts = micro_batch.counts
    if step.recut is not None:
        # The floor's second measurement is of the whole update, and is logged with its first micro-batch.
        for name, total in step.recut.sums.items():
            metrics[name] = Metric(AggregationType.SUM, total * scale)
        counts = counts | step.recut.bins
        step.recut = None
    for name, count in counts.items():
        metrics[name] = Metric(AggregationType.SUM, count * dp_size)
    for name, value in micro_batch.values.items():
        metrics[name] = Metric(AggregationType.MEAN, value)
    return metrics


# The keys of the metrics that are divided by the number of tokens that count.
MEANS = frozenset(
    [
        *(metric.key for metric in (*TOKEN_METRICS, SELECTED) if metric.over is Over.TOKENS),
        *(metric.key for floor in FLOORS for metric in floor.means),
        *SUM_NAME_BY_KEY,
        *AGE_KEY_BY_SUM_KEY,
    ]
)


def exclude_rejected_tokens(metrics: dict[str, Any]) -> None:
    """Turn means over all tokens of an update into means over those that the loss did not reject, in place.

    A micro-batch cannot do it, because the number of rejected tokens is known only after the update's last one.

    Args:
        metrics: an update's, from a key to the `Metric` of each rank.
    """
    if REJECTED.key not in metrics:
        return
    rejected_share = float(Metric.aggregate_dp(metrics_of_ranks(metrics[REJECTED.key])))
    remaining_share = 1 - rejected_share
    if not remaining_share > 0:
        # No token is left, and the sums of all means are 0.
        return
    for key in MEANS & metrics.keys():
        for metric in metrics_of_ranks(metrics[key]):
            metric.values = [value / remaining_share for value in metric.values]


def metrics_of_ranks(metric: Metric | list[Metric]) -> list[Metric]:
    """Return a metric as a list with one `Metric` for each rank; verl gives that of a single rank without a list."""
    return metric if isinstance(metric, list) else [metric]


def step_without_worker(settings: Settings | Observe, schedule: Schedule) -> OptimizerStep:
    """Make the step of a loss call outside train_batch.

    Args:
        settings: the run's.
        schedule: the run's.

    Raises:
        RuntimeError: the settings need the whole mini-batch before its update, which only train_batch has.
    """
    if isinstance(settings, Observe):
        return OptimizerStep(of_rollout_batch=False)
    needs_mini_batch = []
    if schedule.bounds is not DecidedFrom.MICRO_BATCH:
        needs_mini_batch.append(f"{NODE}.scope={settings.scope}")
    # Lopti alone makes several passes over a rollout batch; without it there are no names of passes.
    if schedule.passes:
        needs_mini_batch.append(f"+{NODE}/update=lopti")
    if settings.select is not None:
        needs_mini_batch.append(f"+{NODE}/select")
    elif settings.needs_entropy:
        # The method asks for it.
        needs_mini_batch.append("entropy")
    if needs_mini_batch:
        raise RuntimeError(
            f"{', '.join(needs_mini_batch)} under the method {settings.method.name} needs the mini-batch before its "
            "update, but this worker calls the loss outside TrainingWorker.train_batch, as verl's Tinker worker does. "
            "Train with train_mini_batch or train_batch, or use only a method with fixed bounds "
            f"({swap_by('grpo')})."
        )
    return OptimizerStep(of_rollout_batch=False)


def with_micro_batch(
    loss_fn: Callable[..., Any],
    settings: Settings | Observe,
    schedule: Schedule,
    current_step: Callable[[], OptimizerStep | None],
    observers: RankObservers | None = None,
) -> Callable[..., Any]:
    """Wrap verl's loss function so that the policy loss sees its micro-batch and its metrics are exact.

    Under distillation verl's engine also calls the function as a logits processor, (student_logits, data, ...) -> a
    dictionary of tensors. Such calls pass through.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        settings: the run's.
        schedule: the run's.
        current_step: returns the step that the worker makes; None outside train_batch.
        observers: the worker's; None: there is no worker, and an exception in the metrics ends the call.

    Returns:
        A function that is called as `loss_fn`, and returns what that returns with more metrics.
    """
    rank_observers = RankObservers() if observers is None else observers

    def wrapped(model_output: Any = None, data: Any = None, dp_group: Any = None, **logits_arguments: Any) -> Any:
        """Call verl's loss function with the micro-batch as the current one, and add the exact metrics to its own."""
        if logits_arguments:
            # A call as a logits processor has neither a model output nor a group of ranks.
            return loss_fn(data=data, **logits_arguments)
        step = current_step()
        if step is None:
            step = step_without_worker(settings, schedule)
        micro_batch, loss_output, loss_data = prepare_call(settings, step, model_output, data)
        micro_batch.observers = rank_observers
        with in_micro_batch(micro_batch):
            loss, metrics = loss_fn(model_output=loss_output, data=loss_data, dp_group=dp_group)
        exact = rank_observers.run(METRICS, lambda: exact_metrics(micro_batch, loss_output, loss_data), {})
        report = {} if observers is None else observers.report(exact)
        if step.of_rollout_batch:
            rank_observers.end_micro_batch(micro_batch, loss, model_output, data, dp_group)
        return loss, {**metrics, **exact, **report}

    return wrapped
