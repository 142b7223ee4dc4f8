"""The function that verl calls: tensors of one micro-batch in, scalar loss and metrics out."""

import inspect
import math
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import NODE, declared
from verl_clipx.base.shared_metrics import SELECTED
from verl_clipx.base.tokens import Inputs
from verl_clipx.driver.config import Settings, settings_without_group
from verl_clipx.loss.loss import per_token_loss
from verl_clipx.loss.metrics import TOKENS, to_host, token_metrics, with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import staleness_sums
from verl_clipx.worker.step import MicroBatch, current_micro_batch


def settings_of(registered: str, actor: Any) -> Settings:
    """The settings for a call from verl.

    Args:
        registered: the method's name without prefix, or "custom".
        actor: verl's ActorConfig.

    Raises:
        ValueError: the loss mode and the clipx node name different methods, or "custom" has no node.
    """
    node = actor.policy_loss.get("clipx", None) if hasattr(actor, "policy_loss") else None
    if isinstance(node, Settings):
        if registered not in ("custom", node.method.name):
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode=clipx_{registered} but clipx.method={node.method.name}:"
                f" choose the method by its group alone (+clipx={node.method.name})."
            )
        return node
    if registered == "custom":
        raise ValueError("loss_mode=clipx_custom needs clipx.function: add +clipx=custom clipx.function=module:name.")
    return settings_without_group(registered, actor)


def inputs_of(settings: Settings, known: MicroBatch, **tensors: Tensor) -> Inputs:
    """What a method's formulas get of a micro-batch.

    Args:
        settings: which method.
        known: of the micro-batch, besides the tensors.
        **tensors: log_prob, old_log_prob, advantages, mask.

    Raises:
        ValueError: the method needs what is not there.
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
        registered: which method, without prefix; bound when the function is registered.
        old_log_prob, log_prob, advantages: (sequences, response length), padded.
        response_mask: bool or 0/1, (sequences, response length).
        loss_agg_mode: one of verl's aggregation modes.
        config: verl's ActorConfig.
        rollout_is_weights: (sequences, response length), or None.
        rollout_log_prob, entropy, group: as in `MicroBatch`, outside a worker.

    Returns:
        The scalar loss, and the metrics as floats. Inside a training worker of the plugin the metrics are left in the
        current micro-batch instead, because only the worker can make them exact over the mini-batch.

    Raises:
        ValueError: no config; the method needs what is not given; Lopti outside a worker; or `seq-mean-token-sum-norm`
            without loss_scale_factor, which verl would replace by the padded length of the micro-batch.
        RuntimeError: verl calls it in a worker that is not the plugin's.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    if config is None:
        raise ValueError(f"clipx_{registered} needs verl's ActorConfig: pass config=.")
    if loss_agg_mode == "seq-mean-token-sum-norm" and config.get("loss_scale_factor", None) is None:
        raise ValueError(
            "actor_rollout_ref.actor.loss_scale_factor=null: seq-mean-token-sum-norm would divide by the padded length "
            "of each micro-batch; set it to a constant, for example data.max_response_length."
        )
    settings = settings_of(registered, config)
    micro_batch = current_micro_batch()
    if micro_batch is None and called_by_verl(sys._getframe(1)):
        raise RuntimeError(
            f"clipx_{registered} is called by verl's ppo_loss in a worker without the plugin's set_loss_fn: the "
            f"statistics' scope, {NODE}.update, {NODE}.select and exact metrics would be missing. Derive the worker "
            "from verl.workers.engine_workers.TrainingWorker and have its set_loss_fn call super().set_loss_fn."
        )
    if micro_batch is None and settings.update is not None:
        raise ValueError(f"{NODE}.update: Lopti's passes exist in the plugin's training worker alone.")
    known = micro_batch or MicroBatch(rollout_log_prob=rollout_log_prob, entropy=entropy, group=group)
    method, step, mask = settings.method, known.step, response_mask.bool()
    inputs = inputs_of(settings, known, log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=mask)
    functions = settings.functions(mask.device)

    statistics = step.statistics
    if step.collect or statistics is None:
        found = functions.statistics(inputs)
        statistics = found if statistics is None else statistics
        step.collected = found if step.collected is None else step.collected + found
    decision = method.decide(statistics) if step.decision is None else step.decision
    value, weighted, sums = functions.loss(inputs, decision)
    factor = selected = None
    if rollout_is_weights is not None:
        factor = torch.where(mask, rollout_is_weights.detach().to(value.dtype), 0.0)
        # NaN, since per_token_loss would make a finite number of infinity in half precision.
        value, weighted = (torch.where(factor.isfinite(), of * factor, math.nan) for of in (value, weighted))
    dual_clipped = getattr(method, "dual_clip", None) is not None
    metrics = token_metrics(sums, dual_clipped=dual_clipped, detailed=settings.detailed)

    # For verl's aggregation: the tokens that it averages over, and their number over the mini-batch.
    averaged = mask
    normalisers = {"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info}
    counted = mask if known.counted is None else mask & known.counted
    if settings.select is not None:
        if known.entropy is None:
            raise ValueError(f"clipx.select needs entropy: {REMEDIES['entropy']}.")
        entropy_known = torch.where(mask, known.entropy.detach(), 0.0).isfinite()
        value, weighted = (torch.where(entropy_known, of, math.nan) for of in (value, weighted))
        # A token that is not finite stays, whatever its entropy: left out, it would not make verl skip the step.
        selected = settings.select.selected(known.entropy, mask, step.entropy_bucket) | value.isnan()
        if settings.detailed or settings.selects_over_mini_batch:
            # In a sequence it is the ratio but for rounding.
            metrics[SELECTED.key] = (selected & counted).sum(dtype=torch.float64)
        value, weighted = (torch.where(selected, of, 0.0) for of in (value, weighted))
        if settings.select.normaliser == "selected":
            averaged = selected
            if step.selected_tokens is not None:
                normalisers["batch_num_tokens"] = step.selected_tokens
    if known.traced is not None:
        known.traced.of_method(settings, inputs, decision, factor, selected)
    matrix = per_token_loss(log_prob, value, weighted)
    loss = agg_loss(loss_mat=matrix, loss_mask=averaged, loss_agg_mode=loss_agg_mode, **normalisers)
    if known.age is not None:
        rollout = known.rollout_log_prob
        moved = None if rollout is None else torch.where(mask, log_prob.detach() - rollout, 0.0)
        metrics |= staleness_sums(known.age, log_ratio=moved, mask=counted)
    values, counts = {}, {}
    for metric, members in declared(method, method.metrics(statistics, decision)):
        if settings.detailed or not metric.detailed:
            # Where each micro-batch decides for itself, its counts are a part of the mini-batch's.
            group = counts if metric.adds_up and step.statistics is None else values
            group |= {f"clipx/{name}": tensor for name, tensor in members.items()}
    host_sums, host_values, host_counts, own = to_host(metrics, values, counts, {"loss": loss.detach()})
    if micro_batch is not None:
        micro_batch.loss = own["loss"]
        micro_batch.sums.update(host_sums)
        micro_batch.values.update(host_values)
        micro_batch.counts.update(host_counts)
        return loss, {}
    token_count = max(host_sums.pop(TOKENS), 1.0)
    means = with_ratios_of_sums({name: [total / token_count] for name, total in host_sums.items()})
    return loss, {**{name: value for name, (value,) in means.items()}, **host_values, **host_counts}


def called_by_verl(caller: FrameType) -> bool:
    """Whether a frame is verl's ppo_loss, as against a call of the loss alone."""
    from verl.workers.utils.losses import ppo_loss

    return caller.f_code is inspect.unwrap(ppo_loss).__code__


REMEDIES = {
    "rollout_log_prob": "have the rollout return its log-probabilities (actor_rollout_ref.rollout.calculate_log_probs="
    "True), or, outside verl, pass rollout_log_prob=",
    "entropy": "the plugin's training worker provides it; outside verl, pass entropy=",
    "group": "the plugin's training worker numbers the prompts; outside verl, pass group=",
}
