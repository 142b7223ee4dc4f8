"""The function that verl calls: it gets the tensors of one micro-batch and returns the scalar loss and metrics."""

import math
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.floor import clipped_at_ratio_one, floor_bins, floor_sums
from verl_clipx.losses.applying.loss import TokenLoss, apply
from verl_clipx.losses.applying.metrics import (
    AGE_SUMS,
    TOKENS,
    named_sums,
    to_host,
    token_metrics,
    with_ratios_of_sums,
)
from verl_clipx.losses.base.method import NODE, find_declarations
from verl_clipx.losses.base.refusal import refuse
from verl_clipx.losses.base.shared_metrics import FLOOR, MASKED, MASKED_SEQUENCES, REJECTED, SELECTED
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import mean_over_sequence
from verl_clipx.run.config import Settings, settings_without_group
from verl_clipx.run.keys import refuse_another_loss, refuse_padded_length
from verl_clipx.training.worker.aggregation import aggregate
from verl_clipx.training.worker.observers import METRICS
from verl_clipx.training.worker.rejection import rejection_of
from verl_clipx.training.worker.step import (
    REMEDIES,
    AppliedMethod,
    MicroBatch,
    OptimizerStep,
    current_micro_batch,
    inputs_of,
)


def settings_for(registered: str, config: Any, loss_agg_mode: str) -> Settings:
    """Returns the settings of a call of the loss under a method's name without prefix, or "custom".

    Raises:
        ValueError: there is no ActorConfig; the loss mode and the clipx node name different methods; "custom" has no
            node; or `seq-mean-token-sum-norm` has no loss_scale_factor.
    """
    if config is None:
        raise ValueError(f"clipx_{registered} needs verl's ActorConfig: pass config=.")
    refuse(refuse_padded_length(loss_agg_mode, config.get("loss_scale_factor", None)))
    node = config.policy_loss.get("clipx", None) if hasattr(config, "policy_loss") else None
    if isinstance(node, Settings):
        refuse(refuse_another_loss(f"clipx_{registered}", node))
        return node
    if registered == "custom":
        raise ValueError("loss_mode=clipx_custom needs clipx.function: add +clipx=custom clipx.function=module:name.")
    return settings_without_group(registered, config)


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
    """verl's PolicyLossFn for every method of the plugin; tensors are (sequences, response length), padded.

    Args:
        registered: the method's name without prefix; bound when the function is registered.
        response_mask: bool or 0/1.
        config: verl's ActorConfig.
        rollout_is_weights: verl's weights of rollout correction.
        rollout_log_prob, entropy, group: as in `MicroBatch`; used only outside a training worker.

    Returns:
        The scalar loss, and the metrics as floats. Inside a training worker of the plugin, the metrics are left in the
        current micro-batch instead, because only the worker can make them exact over the mini-batch.

    Raises:
        ValueError: as `settings_for`; a field that is needed is missing; or Lopti is used outside a worker.
        RuntimeError: a worker that is not the plugin's calls this.
    """
    settings = settings_for(registered, config, loss_agg_mode)
    current = current_micro_batch()
    if current is None:
        refuse_outside_worker(settings, config)
    micro_batch = current or MicroBatch(rollout_log_prob=rollout_log_prob, entropy=entropy, group=group)

    whole = response_mask.bool()
    mask = rejection_of(config.policy_loss).remaining(whole, log_prob, old_log_prob)
    inputs = inputs_of(
        settings, micro_batch, log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=mask
    )
    statistics, decision = decide(settings, micro_batch.step, inputs)
    tokens = loss_of_tokens(settings, micro_batch, inputs, decision)
    correction, tokens = correct(tokens, mask, rollout_is_weights)
    kept, tokens = select(settings, micro_batch, mask, tokens)
    averaged, normalisers = normaliser(settings, micro_batch.step, config, mask, kept)
    loss = aggregate(log_prob, tokens.value, tokens.weighted, averaged, loss_agg_mode, **normalisers)
    micro_batch.applied = AppliedMethod(
        settings=settings,
        inputs=inputs,
        decision=decision,
        correction=correction,
        kept=kept if mask is inputs.mask else kept & inputs.mask,
        unmasked=mask,
        whole=whole,
    )

    micro_batch.observers.run(METRICS, lambda: leave_metrics(settings, micro_batch, tokens.sums, statistics, loss))
    return loss, {} if current is not None else metrics_of_call(micro_batch)


def refuse_outside_worker(settings: Settings, config: Any) -> None:
    """Raises if a call outside the plugin's worker needs what only that worker provides.

    In a distributed process, a loss that is divided by the totals of a mini-batch is one of a training worker; a bare
    call is either undivided or not distributed.
    """
    if config.global_batch_info and torch.distributed.is_initialized():
        raise RuntimeError(
            f"clipx_{settings.method.name} is called by verl's ppo_loss in a worker without the plugin's set_loss_fn: "
            f"the statistics' scope, {NODE}.update, {NODE}.select and exact metrics would be missing. Derive the "
            "worker from verl.workers.engine_workers.TrainingWorker and have its set_loss_fn call super().set_loss_fn."
        )
    if settings.update is not None:
        raise ValueError(f"{NODE}.update: Lopti's passes exist only in the plugin's training worker. Remove it here.")


def decide(settings: Settings, step: OptimizerStep, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the statistics that a micro-batch's bounds come from, and what the method decides from them.

    The step has both if they are known before it; the micro-batch's own are added to those that it collects.
    """
    statistics = step.statistics
    decision = step.decision
    if statistics is None or step.collected is not None:
        own = settings.functions(inputs.mask.device).statistics(inputs)
        statistics = own if statistics is None else statistics
        if step.collected is not None:
            step.collected.append(own)
    if decision is None:
        decision = settings.method.decide(statistics)
    return statistics, decision


def loss_of_tokens(settings: Settings, micro_batch: MicroBatch, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """Computes a micro-batch's loss per token; without the sums of the metrics once these have failed."""
    tokens = micro_batch.observers.run(METRICS, lambda: settings.functions(inputs.mask.device).loss(inputs, decision))
    if tokens is None:
        with torch.no_grad(), torch.autocast(inputs.mask.device.type, enabled=False):
            applied = apply(settings.method, settings.shaping, inputs, decision)
        tokens = TokenLoss(value=applied.value, weighted=applied.weighted, sums=decision.new_zeros(0))
    return tokens


def correct(tokens: TokenLoss, mask: Tensor, weights: Tensor | None) -> tuple[Tensor | None, TokenLoss]:
    """Multiplies a micro-batch's loss by verl's weights of rollout correction, (sequences, response length).

    Returns the factor of each token, 0 outside the mask, or None; and the loss, NaN where the factor is not finite.
    """
    if weights is None:
        return None, tokens
    factor = torch.where(mask, weights.detach().to(tokens.value.dtype), 0.0)
    # NaN, because in half precision the loss's gradient would turn infinity into a finite number.
    value = torch.where(factor.isfinite(), tokens.value * factor, math.nan)
    weighted = torch.where(factor.isfinite(), tokens.weighted * factor, math.nan)
    return factor, tokens._replace(value=value, weighted=weighted)


def select(settings: Settings, micro_batch: MicroBatch, mask: Tensor, tokens: TokenLoss) -> tuple[Tensor, TokenLoss]:
    """Applies entropy selection to a micro-batch's loss.

    Returns the tokens that are kept, bool, (sequences, response length), all in the mask without a selection; and the
    loss, 0 for all other tokens and NaN where the entropy is not finite.
    """
    if settings.select is None:
        return mask, tokens
    if micro_batch.entropy is None:
        raise ValueError(f"{NODE}.select needs entropy: {REMEDIES['entropy']}.")
    entropy_known = torch.where(mask, micro_batch.entropy.detach(), 0.0).isfinite()
    value = torch.where(entropy_known, tokens.value, math.nan)
    weighted = torch.where(entropy_known, tokens.weighted, math.nan)
    # A token whose loss is not finite is always kept. Without it, verl would not skip the step.
    kept = settings.select.selected(micro_batch.entropy, mask, micro_batch.step.entropy_bucket) | value.isnan()
    return kept, tokens._replace(value=torch.where(kept, value, 0.0), weighted=torch.where(kept, weighted, 0.0))


def normaliser(
    settings: Settings, step: OptimizerStep, config: Any, mask: Tensor, kept: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Returns what verl's aggregation averages over, tokens, bool, and the mini-batch's totals that it divides by."""
    totals = {"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info}
    if settings.select is None or settings.select.normaliser != "selected":
        return mask, totals
    if step.selected_tokens is not None:
        totals["batch_num_tokens"] = step.selected_tokens
    return kept, totals


def leave_metrics(settings: Settings, micro_batch: MicroBatch, sums: Tensor, statistics: Tensor, loss: Tensor) -> None:
    """Leaves a micro-batch's metrics in it, by a single transfer to the host."""
    method = settings.method
    applied = micro_batch.applied
    values = {}
    counts = {}
    for metric, members in find_declarations(method, method.metrics(statistics, applied.decision)):
        # If each micro-batch decides for itself, its counts are a part of the mini-batch's.
        group = counts if metric.adds_up and micro_batch.step.statistics is None else values
        group |= {f"clipx/{name}": tensor for name, tensor in members.items()}
    if settings.mask is not None:
        counts |= masked_sequences(applied)
    if micro_batch.step.at_ratio_one:
        counts |= floor_bins(applied.inputs, FLOOR)
    of_tokens, more, micro_batch.values, micro_batch.counts, own = to_host(
        named_sums(sums), more_sums(micro_batch), values, counts, {"loss": loss.detach()}
    )
    micro_batch.sums = token_metrics(of_tokens.values(), dual_clipped=method.dual_clip is not None) | more
    if micro_batch.step.at_ratio_one:
        micro_batch.sums |= clipped_at_ratio_one(micro_batch.sums, FLOOR)
    micro_batch.loss = own["loss"]


def more_sums(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Sums over a micro-batch's tokens what is not the loss's own, by metric key: 0-d float64 tensors."""
    settings, inputs, _, _, kept, unmasked, whole = micro_batch.applied
    counted = micro_batch.counted
    metrics = {}

    def number_of(tokens: Tensor) -> Tensor:
        """Return how many of these tokens count."""
        if counted is not None:
            tokens = tokens & counted
        return tokens.sum(dtype=torch.float64)

    # Within each sequence, the share of selected tokens is the configured one up to rounding.
    if settings.selects_over_mini_batch:
        metrics[SELECTED.key] = number_of(kept)
    if inputs.mask is not whole:
        metrics[REJECTED.key] = number_of(whole & ~inputs.mask)
    if settings.mask is not None:
        masked = by_sign(unmasked & ~inputs.mask, inputs.advantages)
        metrics |= {MASKED[sign].key: number_of(of_sign) for sign, of_sign in masked.items()}
    if micro_batch.age is not None:
        of_age = inputs.mask if counted is None else inputs.mask & counted
        tokens = of_age.sum(1, dtype=torch.float64)
        sums = tokens @ micro_batch.age.to(tokens)
        metrics |= dict(zip(AGE_SUMS, sums.unbind(), strict=True))
    if micro_batch.step.at_ratio_one:
        metrics |= floor_sums(inputs, FLOOR)
    return metrics


def masked_sequences(applied: AppliedMethod) -> dict[str, Tensor]:
    """Counts the sequences that a mask takes out whole, by metric key: 0-d tensors."""
    inputs = applied.inputs
    unmasked = applied.unmasked
    gone = unmasked.any(-1, keepdim=True) & ~inputs.mask.any(-1, keepdim=True)
    of_sign = by_sign(gone, mean_over_sequence(inputs.advantages, unmasked))
    return {MASKED_SEQUENCES[sign].key: members.sum(dtype=torch.float64) for sign, members in of_sign.items()}


def by_sign(members: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Returns those of the members with a negative and those with a positive advantage, bool."""
    return {"negative": members & (advantages < 0), "positive": members & (advantages > 0)}


def metrics_of_call(micro_batch: MicroBatch) -> dict[str, float]:
    """Returns the metrics of a single call outside a worker: means over its tokens, and what the method decided."""
    tokens = max(micro_batch.sums[TOKENS], 1.0)
    # Of the rejected tokens only the worker knows which share of the mini-batch they are.
    sums = {key: total for key, total in micro_batch.sums.items() if key not in (TOKENS, REJECTED.key)}
    means = with_ratios_of_sums({key: [total / tokens] for key, total in sums.items()})
    return {**{key: value for key, (value,) in means.items()}, **micro_batch.values, **micro_batch.counts}
