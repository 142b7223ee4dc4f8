"""The function that verl calls: it gets the tensors of one micro-batch and returns the scalar loss and metrics."""

import inspect
import math
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import NODE, Method, declared
from verl_clipx.base.shared_metrics import REJECTED, SELECTED
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.compiled import TokenFunctions
from verl_clipx.loss.metrics import TOKENS, named_sums, to_host, token_metrics, with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import staleness_sums
from verl_clipx.run.config import Settings, settings_without_group
from verl_clipx.run.verl_keys import another_loss, refuse_padded_length
from verl_clipx.worker.aggregation import aggregated
from verl_clipx.worker.rejection import rejection_of
from verl_clipx.worker.step import MicroBatch, OptimizerStep, current_micro_batch


def settings_for(registered: str, config: Any, loss_agg_mode: str) -> Settings:
    """The settings of a call of the loss.

    Args:
        registered: the method's name without prefix, or "custom".
        config: verl's ActorConfig.
        loss_agg_mode: one of verl's aggregation modes.

    Raises:
        ValueError: there is no config; the loss mode and the clipx node name different methods; "custom" has no node;
            or `seq-mean-token-sum-norm` has no loss_scale_factor.
    """
    if config is None:
        raise ValueError(f"clipx_{registered} needs verl's ActorConfig: pass config=.")
    refuse_padded_length(loss_agg_mode, config.get("loss_scale_factor", None))
    node = config.policy_loss.get("clipx", None) if hasattr(config, "policy_loss") else None
    if isinstance(node, Settings):
        if other := another_loss(f"clipx_{registered}", node):
            raise other
        return node
    if registered == "custom":
        raise ValueError("loss_mode=clipx_custom needs clipx.function: add +clipx=custom clipx.function=module:name.")
    return settings_without_group(registered, config)


def inputs_of(settings: Settings, known: MicroBatch, **tensors: Tensor) -> Inputs:
    """The inputs of a method's formulas for one micro-batch.

    Args:
        settings: the clipx node, with the method.
        known: what is known of the micro-batch besides the tensors.
        **tensors: log_prob, old_log_prob, advantages, mask, each (sequences, response length).

    Raises:
        ValueError: the method needs a field that is missing; says how to provide it.
    """
    optional = {name: getattr(known, name) for name in settings.method.asks_for}
    for name, tensor in optional.items():
        if tensor is None:
            raise ValueError(f"clipx_{settings.method.name} needs {name}: {REMEDIES[name]}.")
    return Inputs(**tensors, counted=known.counted, **optional)


def policy_loss(
    registered: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    group: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, float]]:
    """verl's PolicyLossFn for every method of the plugin.

    Args:
        registered: the method's name without prefix; bound when the function is registered.
        old_log_prob, log_prob, advantages: (sequences, response length), padded.
        response_mask: bool or 0/1, (sequences, response length).
        loss_agg_mode: one of verl's aggregation modes.
        config: verl's ActorConfig.
        rollout_is_weights: verl's weights of rollout correction, (sequences, response length), or None.
        rollout_log_prob, entropy, group: as in `MicroBatch`; used only outside a training worker.

    Returns:
        The scalar loss, and the metrics as floats. Inside a training worker of the plugin, the metrics are left in the
        current micro-batch instead, because only the worker can make them exact over the mini-batch.

    Raises:
        ValueError: as `settings_for`; the method or the selection needs a field that is missing; or Lopti is used
            outside a worker.
        RuntimeError: verl calls this in a worker that is not the plugin's.
    """
    settings = settings_for(registered, config, loss_agg_mode)
    micro_batch = current_micro_batch()
    if micro_batch is None:
        refuse_outside_worker(settings, sys._getframe(1))
    known = micro_batch or MicroBatch(rollout_log_prob=rollout_log_prob, entropy=entropy, group=group)
    whole = response_mask.bool()
    mask = rejection_of(config.policy_loss).remaining(whole, log_prob, old_log_prob)
    inputs = inputs_of(settings, known, log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=mask)
    functions = settings.functions(mask.device)

    statistics, decision = decided(settings.method, functions, inputs, known.step)
    value, weighted, sums = functions.loss(inputs, decision)
    factor = None
    if rollout_is_weights is not None:
        factor = torch.where(mask, rollout_is_weights.detach().to(value.dtype), 0.0)
        # NaN, because in half precision the loss's gradient would turn infinity into a finite number.
        value, weighted = (torch.where(factor.isfinite(), of * factor, math.nan) for of in (value, weighted))
    selected = None
    if settings.select is not None:
        selected, value, weighted = with_selection(settings, known, mask, value, weighted)
    if known.traced is not None:
        kept = mask if selected is None and mask is not whole else selected
        known.traced.of_method(settings, inputs, decision, factor, kept, whole)

    # For verl's aggregation: the tokens that it averages over, and how many there are in the mini-batch.
    averaged = mask
    normalisers = {"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info}
    if selected is not None and settings.select.normaliser == "selected":
        averaged = selected
        if known.step.selected_tokens is not None:
            normalisers["batch_num_tokens"] = known.step.selected_tokens
    loss = aggregated(log_prob, value, weighted, averaged, loss_agg_mode, **normalisers)

    more = more_sums(settings, known, inputs, selected)
    if micro_batch is not None and mask is not whole:
        more[REJECTED.key] = number_of(whole & ~mask, known.counted)
    values, counts = decision_to_log(settings, known.step, statistics, decision)
    of_tokens, host_more, host_values, host_counts, own = to_host(
        named_sums(sums, detailed=settings.detailed), more, values, counts, {"loss": loss.detach()}
    )
    dual_clipped = getattr(settings.method, "dual_clip", None) is not None
    host_sums = token_metrics(of_tokens.values(), dual_clipped=dual_clipped, detailed=settings.detailed) | host_more
    if micro_batch is not None:
        micro_batch.loss = own["loss"]
        micro_batch.sums.update(host_sums)
        micro_batch.values.update(host_values)
        micro_batch.counts.update(host_counts)
        return loss, {}
    token_count = max(host_sums.pop(TOKENS), 1.0)
    means = with_ratios_of_sums({name: [total / token_count] for name, total in host_sums.items()})
    return loss, {**{name: value for name, (value,) in means.items()}, **host_values, **host_counts}


def refuse_outside_worker(settings: Settings, caller: FrameType) -> None:
    """Raises if a call outside the plugin's worker needs what only that worker provides.

    Args:
        caller: the frame that called the loss.

    Raises:
        RuntimeError: verl's ppo_loss is the caller.
        ValueError: the settings have Lopti.
    """
    if called_by_verl(caller):
        raise RuntimeError(
            f"clipx_{settings.method.name} is called by verl's ppo_loss in a worker without the plugin's set_loss_fn: "
            f"the statistics' scope, {NODE}.update, {NODE}.select and exact metrics would be missing. Derive the "
            "worker from verl.workers.engine_workers.TrainingWorker and have its set_loss_fn call super().set_loss_fn."
        )
    if settings.update is not None:
        raise ValueError(f"{NODE}.update: Lopti's passes exist only in the plugin's training worker. Remove it here.")


def decided(method: Method, functions: TokenFunctions, inputs: Inputs, step: OptimizerStep) -> tuple[Tensor, Tensor]:
    """The statistics that a micro-batch's bounds come from, and what the method decides from them.

    Args:
        method, functions: of the run.
        step: the optimizer step that it belongs to; if it collects, the micro-batch's own statistics are added to it.
    """
    statistics = step.statistics
    if step.collect or statistics is None:
        found = functions.statistics(inputs)
        statistics = found if statistics is None else statistics
        step.collected = found if step.collected is None else step.collected + found
    return statistics, method.decide(statistics) if step.decision is None else step.decision


def with_selection(
    settings: Settings, known: MicroBatch, mask: Tensor, value: Tensor, weighted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies entropy selection to a micro-batch's loss. All tensors are (sequences, response length).

    Args:
        settings: the clipx node, with a selection.
        known: what is known of the micro-batch.
        mask: bool.
        value, weighted: the loss of each token and its F * A.

    Returns:
        The selected tokens, bool; value and F * A, 0 for all other tokens and NaN where the entropy is not finite.

    Raises:
        ValueError: the entropy is not given.
    """
    if known.entropy is None:
        raise ValueError(f"{NODE}.select needs entropy: {REMEDIES['entropy']}.")
    entropy_known = torch.where(mask, known.entropy.detach(), 0.0).isfinite()
    value, weighted = (torch.where(entropy_known, of, math.nan) for of in (value, weighted))
    # A token whose loss is not finite is always kept. Without it, verl would not skip the step.
    selected = settings.select.selected(known.entropy, mask, known.step.entropy_bucket) | value.isnan()
    return selected, torch.where(selected, value, 0.0), torch.where(selected, weighted, 0.0)


def more_sums(settings: Settings, known: MicroBatch, inputs: Inputs, selected: Tensor | None) -> dict[str, Tensor]:
    """The sums over a micro-batch's tokens that are not the loss's own, by metric name: 0-d float64 tensors.

    Args:
        settings, known, inputs: of the micro-batch.
        selected: bool, (sequences, response length); None without selection.
    """
    metrics: dict[str, Tensor] = {}
    # Within each sequence, the share of selected tokens is the configured one up to rounding: a detail.
    if selected is not None and (settings.detailed or settings.selects_over_mini_batch):
        metrics[SELECTED.key] = number_of(selected, known.counted)
    if known.age is not None:
        rollout = known.rollout_log_prob
        moved = None if rollout is None else torch.where(inputs.mask, inputs.log_prob.detach() - rollout, 0.0)
        counted = inputs.mask if known.counted is None else inputs.mask & known.counted
        metrics |= staleness_sums(known.age, log_ratio=moved, mask=counted)
    return metrics


def number_of(tokens: Tensor, counted: Tensor | None) -> Tensor:
    """How many of the tokens count, 0-d float64. Both are bool, (sequences, response length); None: all count."""
    return (tokens if counted is None else tokens & counted).sum(dtype=torch.float64)


def decision_to_log(
    settings: Settings, step: OptimizerStep, statistics: Tensor, decision: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The metrics of a decision by key: first the values, then the counts that add up over micro-batches.

    Args:
        statistics, decision: from `decided`.
    """
    values, counts = {}, {}
    for metric, members in declared(settings.method, settings.method.metrics(statistics, decision)):
        if settings.detailed or not metric.detailed:
            # If each micro-batch decides for itself, its counts are a part of the mini-batch's.
            group = counts if metric.adds_up and step.statistics is None else values
            group |= {f"clipx/{name}": tensor for name, tensor in members.items()}
    return values, counts


def called_by_verl(caller: FrameType) -> bool:
    """Whether a frame is verl's ppo_loss, and not a direct call of the loss."""
    from verl.workers.utils.losses import ppo_loss

    return caller.f_code is inspect.unwrap(ppo_loss).__code__


REMEDIES = {
    "rollout_log_prob": "have the rollout return its log-probabilities (actor_rollout_ref.rollout.calculate_log_probs="
    "True), or, outside verl, pass rollout_log_prob=",
    "entropy": "the plugin's training worker provides it; outside verl, pass entropy=",
    "group": "the plugin's training worker numbers the prompts; outside verl, pass group=",
}
