"""The function that verl calls: it gets the tensors of one micro-batch and returns the scalar loss and metrics."""

import math
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.floor import clipped_at_ratio_one, floor_bins, floor_sums
from verl_clipx.losses.applying.loss import TokenLoss, apply
from verl_clipx.losses.applying.metrics import (
    AGE_KEY_BY_SUM_KEY,
    TOKENS,
    name_sums,
    replace_sums_with_metrics,
    to_host,
    token_metrics,
)
from verl_clipx.losses.base.method import NODE, find_declarations
from verl_clipx.losses.base.refusal import raise_refusals
from verl_clipx.losses.base.shared_metrics import FLOOR, MASKED, MASKED_SEQUENCES, REJECTED, SELECTED
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import mean_over_sequence
from verl_clipx.run.config import Settings, settings_without_group
from verl_clipx.run.keys import refuse_contradicting_loss_mode, refuse_padded_length
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
    """Return the settings of a call of the loss.

    Args:
        registered: the name of the loss without prefix: that of a method, or "custom".
        config: verl's ActorConfig.
        loss_agg_mode: how verl averages the losses of tokens.

    Raises:
        ValueError: there is no ActorConfig; the loss mode and the clipx node name different methods; "custom" has no
            node; or `seq-mean-token-sum-norm` has no loss_scale_factor.
    """
    if config is None:
        raise ValueError(f"clipx_{registered} needs verl's ActorConfig: pass config=.")
    raise_refusals(refuse_padded_length(loss_agg_mode, config.get("loss_scale_factor", None)))
    node = config.policy_loss.get("clipx", None) if hasattr(config, "policy_loss") else None
    if isinstance(node, Settings):
        raise_refusals(refuse_contradicting_loss_mode(f"clipx_{registered}", node))
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
    """Compute the loss of a micro-batch: verl's PolicyLossFn for every method of the plugin.

    Tensors are (sequences, response length), padded.

    Args:
        registered: the method's name without prefix. It is bound when the function is registered.
        old_log_prob, log_prob: log-probabilities under the old and the current policy, in nats.
        advantages: before shaping.
        response_mask: bool or 0/1.
        loss_agg_mode: how verl averages the losses of tokens.
        config: verl's ActorConfig.
        rollout_is_weights: verl's weights of rollout correction; None without them.
        rollout_log_prob, entropy, group: as in `MicroBatch`; used only outside a training worker.

    Returns:
        The scalar loss, and the metrics as floats. Inside a training worker of the plugin, the metrics are left in the
        current micro-batch instead, because only the worker can make them exact over the mini-batch.

    Raises:
        ValueError: as for `settings_for`; a field that is needed is missing; or Lopti is used outside a worker.
        RuntimeError: a worker that is not the plugin's calls this function.
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
    if current is not None:
        return loss, {}
    return loss, metrics_of_call(micro_batch)


def refuse_outside_worker(settings: Settings, config: Any) -> None:
    """Raise if a call outside the plugin's worker needs what only that worker provides.

    In a distributed process, a loss that is divided by the totals of a mini-batch is one of a training worker. A call
    without a worker either has no such totals or is not in a distributed process.

    Raises:
        RuntimeError: the call is that of a training worker that is not the plugin's.
        ValueError: the settings have Lopti.
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
    """Return the statistics that a micro-batch's bounds come from, and what the method decides from them.

    If the step has no statistics of its own, they are the micro-batch's. A step that collects statistics gets the
    micro-batch's in any case.
    """
    statistics = step.statistics
    decision = step.decision
    if statistics is None or step.collected is not None:
        of_micro_batch = settings.functions(inputs.mask.device).statistics(inputs)
        if statistics is None:
            statistics = of_micro_batch
        if step.collected is not None:
            step.collected.append(of_micro_batch)
    if decision is None:
        decision = settings.method.decide(statistics)
    return statistics, decision


def loss_of_tokens(settings: Settings, micro_batch: MicroBatch, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """Compute a micro-batch's loss per token, without the sums of the metrics once these have failed."""
    tokens = micro_batch.observers.run(METRICS, lambda: settings.functions(inputs.mask.device).loss(inputs, decision))
    if tokens is None:
        with torch.no_grad(), torch.autocast(inputs.mask.device.type, enabled=False):
            applied = apply(settings.method, settings.shaping, inputs, decision)
        tokens = TokenLoss(value=applied.value, weighted=applied.weighted, sums=decision.new_zeros(0))
    return tokens


def correct(tokens: TokenLoss, mask: Tensor, weights: Tensor | None) -> tuple[Tensor | None, TokenLoss]:
    """Multiply a micro-batch's loss by verl's weights of rollout correction.

    Args:
        tokens: the loss per token.
        mask: the tokens that count, bool, (sequences, response length).
        weights: verl's, (sequences, response length); None without a correction.

    Returns:
        The factor of each token, 0 outside the mask, or None without weights; and the loss, NaN where the factor is not
        finite.
    """
    if weights is None:
        return None, tokens
    factor = torch.where(mask, weights.detach().to(tokens.value.dtype), 0.0)
    # NaN, because in half precision the loss's gradient would turn infinity into a finite number.
    value = torch.where(factor.isfinite(), tokens.value * factor, math.nan)
    weighted = torch.where(factor.isfinite(), tokens.weighted * factor, math.nan)
    return factor, tokens._replace(value=value, weighted=weighted)


def select(settings: Settings, micro_batch: MicroBatch, mask: Tensor, tokens: TokenLoss) -> tuple[Tensor, TokenLoss]:
    """Apply entropy selection to a micro-batch's loss.

    Args:
        settings: the run's.
        micro_batch: has the entropy, if there is a selection.
        mask: the tokens that count, bool, (sequences, response length).
        tokens: the loss per token.

    Returns:
        The tokens that are kept, bool, (sequences, response length), which are all in the mask without a selection; and
        the loss, 0 for all other tokens and NaN where the entropy is not finite.

    Raises:
        ValueError: there is a selection and no entropy.
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
    """Return what verl's aggregation averages over: the tokens, and the mini-batch's totals that it divides by.

    Args:
        settings: the run's.
        step: the optimizer step.
        config: verl's ActorConfig.
        mask: the tokens that count, bool, (sequences, response length).
        kept: those of them that the selection keeps.

    Returns:
        One of both masks; and arguments of `aggregate` by name.
    """
    totals = {"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info}
    if settings.select is None or settings.select.normaliser != "selected":
        return mask, totals
    if step.selected_tokens is not None:
        totals["batch_num_tokens"] = step.selected_tokens
    return kept, totals


def leave_metrics(settings: Settings, micro_batch: MicroBatch, sums: Tensor, statistics: Tensor, loss: Tensor) -> None:
    """Leave a micro-batch's metrics in it, by a single transfer to the host.

    Args:
        settings: the run's.
        micro_batch: gets the sums, values, counts and the value of the loss.
        sums: those of the loss, by `name_sums`.
        statistics: what the bounds were decided from.
        loss: the scalar loss.
    """
    method = settings.method
    applied = micro_batch.applied
    values = {}
    counts = {}
    for metric, members in find_declarations(method, method.metrics(statistics, applied.decision)):
        # If each micro-batch decides for itself, its counts are a part of the mini-batch's.
        adds_up = metric.adds_up and micro_batch.step.statistics is None
        metrics = counts if adds_up else values
        for name, tensor in members.items():
            metrics[f"clipx/{name}"] = tensor
    if settings.mask is not None:
        counts |= count_masked_sequences(applied)
    if micro_batch.step.at_ratio_one:
        counts |= floor_bins(applied.inputs, FLOOR)
    sums_of_loss, other_sums, micro_batch.values, micro_batch.counts, values_of_loss = to_host(
        name_sums(sums), sum_other_metrics(micro_batch), values, counts, {"loss": loss.detach()}
    )
    micro_batch.sums = token_metrics(sums_of_loss.values(), dual_clipped=method.dual_clip is not None) | other_sums
    if micro_batch.step.at_ratio_one:
        micro_batch.sums |= clipped_at_ratio_one(micro_batch.sums, FLOOR)
    micro_batch.loss = values_of_loss["loss"]


def sum_other_metrics(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Return the sums over a micro-batch's tokens that the loss does not compute: by metric key, 0-d, float64."""
    applied = micro_batch.applied
    settings = applied.settings
    inputs = applied.inputs
    counted = micro_batch.counted
    metrics = {}

    def count(tokens: Tensor) -> Tensor:
        """Return how many of these tokens count."""
        if counted is not None:
            tokens = tokens & counted
        return tokens.sum(dtype=torch.float64)

    # Not logged for a selection within each sequence, whose share is the configured one up to rounding.
    if settings.selects_over_mini_batch:
        metrics[SELECTED.key] = count(applied.kept)
    if applied.mask_may_lack_tokens:
        metrics[REJECTED.key] = count(applied.whole & ~inputs.mask)
    if settings.mask is not None:
        masked = split_by_sign(applied.unmasked & ~inputs.mask, inputs.advantages)
        for sign, tokens_of_sign in masked.items():
            metrics[MASKED[sign].key] = count(tokens_of_sign)
    if micro_batch.age is not None:
        aged_tokens = inputs.mask if counted is None else inputs.mask & counted
        token_counts = aged_tokens.sum(1, dtype=torch.float64)
        sums = token_counts @ micro_batch.age.to(token_counts)
        metrics |= dict(zip(AGE_KEY_BY_SUM_KEY, sums.unbind(), strict=True))
    if micro_batch.step.at_ratio_one:
        metrics |= floor_sums(inputs, FLOOR)
    return metrics


def count_masked_sequences(applied: AppliedMethod) -> dict[str, Tensor]:
    """Count the sequences of which a mask removes every token: by metric key, 0-d, float64."""
    inputs = applied.inputs
    unmasked = applied.unmasked
    is_removed = unmasked.any(-1, keepdim=True) & ~inputs.mask.any(-1, keepdim=True)
    removed = split_by_sign(is_removed, mean_over_sequence(inputs.advantages, unmasked))
    return {MASKED_SEQUENCES[sign].key: of_sign.sum(dtype=torch.float64) for sign, of_sign in removed.items()}


def split_by_sign(members: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Split members by the sign of their advantage. Members with an advantage of 0 are in neither part.

    Args:
        members: bool.
        advantages: of the same shape.

    Returns:
        "negative" and "positive", bool.
    """
    return {"negative": members & (advantages < 0), "positive": members & (advantages > 0)}


def metrics_of_call(micro_batch: MicroBatch) -> dict[str, float]:
    """Return the metrics of a single call outside a worker: means over its tokens, the method's values, and counts."""
    token_count = max(micro_batch.sums[TOKENS], 1.0)
    # Only the worker knows which share of the mini-batch the rejected tokens are.
    left_out = (TOKENS, REJECTED.key)
    # `replace_sums_with_metrics` takes the values of several updates. Here there is one.
    means = {key: [total / token_count] for key, total in micro_batch.sums.items() if key not in left_out}
    metrics = {key: values[0] for key, values in replace_sums_with_metrics(means).items()}
    return {**metrics, **micro_batch.values, **micro_batch.counts}
