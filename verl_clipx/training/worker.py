"""verl's training worker with the plugin's view of every micro-batch.

Without a clipx node in its configuration it behaves exactly like verl's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import TrainingWorker

from verl_clipx.training.config import MethodConfig
from verl_clipx.training.metrics import TOKENS
from verl_clipx.training.micro_batch import MicroBatch, in_micro_batch


def clipx_node(loss_fn: Any) -> MethodConfig | None:
    """The clipx configuration inside verl's loss function; None if the run has none.

    Args:
        loss_fn: what verl's ActorRolloutRefWorker gives to `set_loss_fn`: a partial with the ActorConfig as `config`.
    """
    config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    node = policy_loss.get("clipx", None) if policy_loss is not None else None
    return node if isinstance(node, MethodConfig) else None


def rollout_log_prob(data: Any) -> Any:
    """The rollout policy's log-probabilities of a micro-batch, padded; None if the rollout did not return them."""
    if "rollout_log_probs" not in data:
        return None
    values = data["rollout_log_probs"]
    return values.to_padded_tensor(0.0) if values.is_nested else values


def exact_metrics(micro_batch: MicroBatch, *, dp_size: int, batch_num_tokens: float) -> dict[str, Metric]:
    """Metrics whose aggregate over micro-batches and ranks is the exact value over the optimizer mini-batch.

    verl sums a SUM metric over micro-batches and averages it over data-parallel ranks, so a local sum is multiplied by
    the number of ranks and divided by the number of tokens of the whole mini-batch.

    Args:
        micro_batch: with the sums and values that the loss left.
        dp_size: number of data-parallel ranks.
        batch_num_tokens: response tokens of the mini-batch over all ranks.
    """
    scale = dp_size / max(batch_num_tokens, 1)
    metrics = {
        name: Metric(AggregationType.SUM, total * scale) for name, total in micro_batch.sums.items() if name != TOKENS
    }
    for name, value in micro_batch.values.items():
        if "/count/" in name:
            metrics[name] = Metric(AggregationType.SUM, value * dp_size)
        else:
            metrics[name] = Metric(AggregationType.MEAN, value)
    return metrics


def observing(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps verl's loss function so that the policy loss sees its micro-batch and its metrics come out exact.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
    """

    def observed(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        dp_size, batch_num_tokens = data["dp_size"], data["batch_num_tokens"]
        with in_micro_batch(MicroBatch(rollout_log_prob(data))) as micro_batch:
            loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        metrics.update(exact_metrics(micro_batch, dp_size=dp_size, batch_num_tokens=batch_num_tokens))
        return loss, metrics

    return observed


class ClipxTrainingWorker(TrainingWorker):
    """TrainingWorker whose loss is observed when the run has a clipx node."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn):
        """Installs verl's loss function, wrapped if the run has a clipx node."""
        super().set_loss_fn(loss_fn if clipx_node(loss_fn) is None else observing(loss_fn))
