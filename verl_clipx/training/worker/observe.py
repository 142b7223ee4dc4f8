"""+clipx=observe: leaves verl's own policy loss unchanged and measures its effect on each token by its gradient.

verl adds the KL and entropy terms to what the policy loss returns. The gradient of the policy term by itself exists
only inside that function, so its entry in verl's registry is wrapped. No other module relies on this.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.floor import clipped_at_ratio_one, floor_bins, floor_sums
from verl_clipx.losses.applying.metrics import OF_GRADIENT, to_host
from verl_clipx.losses.applying.observed import observed_metrics, observed_sums
from verl_clipx.losses.base.shared_metrics import FLOOR
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.run.config import Observe, clip_range
from verl_clipx.training.worker.observers import METRICS
from verl_clipx.training.worker.step import AppliedLoss, MicroBatch, current_micro_batch

# Losses that clip a whole sequence by its mean log-ratio. geo_mean is not one of them: its ratio is the sequence's, but
# verl clamps each token's own log-ratio. tests/training/worker/test_observe.py tells the two kinds apart by experiment.
SEQUENCE_LEVEL = frozenset({"gspo"})


def observe_registered(loss_mode: str) -> None:
    """Replace a loss in verl's registry by one that also measures what it does; idempotent.

    Under +clipx=observe it leaves what it has measured in the current micro-batch. It returns the same numbers to the
    last bit. verl calls policy losses with keyword arguments.

    Args:
        loss_mode: the loss's name in the registry.

    Raises:
        ValueError: there is no loss of that name.
    """
    from verl.trainer.ppo import core_algos

    function = core_algos.get_policy_loss_fn(loss_mode)
    by_sequence = loss_mode in SEQUENCE_LEVEL
    if getattr(function, "observed_by_clipx", False):
        return

    @functools.wraps(function)
    def with_metrics(*arguments: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        """Call the loss, and measure what it did if the worker trains under +clipx=observe."""
        loss, metrics = function(*arguments, **named)
        micro_batch = current_micro_batch()
        config = named.get("config")
        node = getattr(getattr(config, "policy_loss", None), "clipx", None)
        if micro_batch is not None and isinstance(node, Observe) and loss.requires_grad:
            micro_batch.observers.run(METRICS, lambda: measure(micro_batch, loss, named, by_sequence))
        return loss, metrics

    with_metrics.observed_by_clipx = True
    core_algos.POLICY_LOSS_REGISTRY[loss_mode] = with_metrics


def measure(micro_batch: MicroBatch, loss: Tensor, named: dict[str, Any], by_sequence: bool) -> None:
    """Measure what one of verl's losses did to a micro-batch's tokens.

    Args:
        micro_batch: gets the sums, counts, the value of the loss, and `applied`.
        loss: the scalar that the loss returned, with a graph.
        named: the named arguments that it was called with.
        by_sequence: whether it clips whole sequences.
    """
    config = named["config"]
    # The gradient of log_prob itself: that of an alias would add up its terms in another order and round
    # differently. The graph behind log_prob is not traversed.
    with torch.autocast(loss.device.type, enabled=False):
        (gradient,) = torch.autograd.grad(loss, named["log_prob"], retain_graph=True, materialize_grads=True)
    inputs = Inputs(
        log_prob=named["log_prob"].detach(),
        old_log_prob=named["old_log_prob"].detach(),
        advantages=named["advantages"].detach(),
        mask=named["response_mask"].bool(),
    )
    with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
        observed = observed_sums(inputs, gradient, clip_range(config), by_sequence)
    micro_batch.applied = AppliedLoss(
        inputs=inputs,
        gradient=gradient,
        bounds=clip_range(config),
        by_sequence=by_sequence,
        loss_agg_mode=named["loss_agg_mode"],
        config=config,
    )
    sums_of_floor = {}
    bins_of_floor = {}
    if micro_batch.step.at_ratio_one:
        sums_of_floor = floor_sums(inputs, FLOOR)
        bins_of_floor = floor_bins(inputs, FLOOR)
    # A single transfer to the host.
    sums, sums_of_floor, bins_of_floor, values = to_host(
        observed_metrics(observed), sums_of_floor, bins_of_floor, {"loss": loss.detach()}
    )
    micro_batch.loss = values["loss"]
    if micro_batch.step.at_ratio_one:
        micro_batch.sums |= sums_of_floor | clipped_at_ratio_one(sums, FLOOR)
        micro_batch.counts |= bins_of_floor
    # Converts to units of |F*A|: under token-mean a token's weight in the loss is ranks / mini-batch tokens.
    mini_batch = config.global_batch_info
    unit = max(mini_batch["batch_num_tokens"], 1) / mini_batch["dp_size"]
    for key, value in sums.items():
        micro_batch.sums[key] = value * unit if key in OF_GRADIENT else value
