"""The function that verl calls: tensors of one micro-batch in, scalar loss and metrics out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.policy_gradient import per_token_loss
from verl_clipx.losses.ratio import clamped, compute_dtype, importance_ratio
from verl_clipx.masking import as_bits, kept
from verl_clipx.tokens.advantage_reweighting import reweighted_advantages
from verl_clipx.tokens.entropy_selection import (
    entropy_statistics,
    entropy_threshold,
    select_by_threshold,
    select_per_sequence,
)
from verl_clipx.training.config import MethodConfig, values
from verl_clipx.training.methods import METHODS, Method, call_by_name, controller_of, parameter_names
from verl_clipx.training.metrics import COUNTED, SUMMED, TOKENS, to_host, token_metrics, token_sums
from verl_clipx.training.micro_batch import MicroBatch, current_micro_batch
from verl_clipx.training.modifiers import SelectionConfig
from verl_clipx.training.staleness import staleness_sums

# Tokens whose intermediate results are held at a time. Results do not depend on it beyond the rounding of sums; memory
# does, and on a CPU a block stays in the cache.
BLOCK_TOKENS = 48 * 1024


class TokenLoss(NamedTuple):
    """The loss of each token before aggregation, as plain numbers.

    Args:
        value: what is logged as the loss, (sequences, length), 0 outside the mask.
        gradient: F*A, minus the gradient of the loss with respect to log_prob, (sequences, length).
        weight: gradient weight F, (sequences, length).
        bounds: clip bounds on the ratio.
    """

    value: Tensor
    gradient: Tensor
    weight: Tensor
    bounds: Bounds


class Tokens(NamedTuple):
    """A micro-batch's tokens, detached, 0 outside the mask, in the precision that the loss is computed in.

    Args:
        log_prob, old_log_prob: log-probabilities under the current and the old policy, (sequences, length).
        advantages: (sequences, length), after shaping.
        rollout_log_prob: under the rollout policy, or None.
        mask: bool, (sequences, length).
        bits: the mask as `kept` takes it fastest.
        ratio, log_ratio: importance-sampling ratio and its logarithm, clamped as configured.
        free_ratio: the ratio without the clamp, within the range of the dtype.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    rollout_log_prob: Tensor | None
    mask: Tensor
    bits: Tensor
    ratio: Tensor
    log_ratio: Tensor
    free_ratio: Tensor


def tokens_of(
    config: MethodConfig,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_log_prob: Tensor | None = None,
) -> Tokens:
    """What a loss and its statistics are computed from.

    Args:
        config: the method's configuration.
        old_log_prob, log_prob: log-probabilities under the old and the current policy, (sequences, length).
        advantages: (sequences, length).
        mask: bool, (sequences, length); values outside are never used, not even NaN.
        rollout_log_prob: log-probabilities under the rollout policy, or None.
    """
    dtype = compute_dtype(log_prob.dtype)
    bits = as_bits(mask, dtype)

    def inside(tensor: Tensor) -> Tensor:
        return kept(tensor.detach().to(dtype), bits)

    current, old = inside(log_prob), inside(old_log_prob)
    log_ratio, free_ratio = importance_ratio(current, old, None)
    ratio = free_ratio
    if config.log_ratio_clamp is not None:
        log_ratio, ratio = clamped(log_ratio, ratio, config.log_ratio_clamp)
    shaped = inside(advantages)
    if config.shaping is not None:
        chosen = old if config.shaping.probability == "old" else current
        shaped = kept(reweighted_advantages(shaped, chosen, alpha=config.shaping.alpha), bits)
    rollout = None if rollout_log_prob is None else inside(rollout_log_prob)
    return Tokens(current, old, shaped, rollout, mask, bits, ratio, log_ratio, free_ratio)


def statistics_of(method: Method, config: MethodConfig, tokens: Tokens, counted: Tensor | None = None) -> Tensor:
    """The additive statistics behind a method's bounds.

    Args:
        method: the method.
        config: its configuration.
        tokens: the tokens.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.

    Returns:
        (statistics_size,), float64.

    Raises:
        ValueError: the configuration needs rollout log-probabilities and there are none.
    """
    offered = tokens._asdict()
    if counted is not None:
        offered["mask"] = tokens.mask & counted
    return call_by_name(controller_of(method, config).statistics, offered)


def token_loss(
    method: Method, config: MethodConfig, tokens: Tokens, decision: Tensor, rollout_is_weights: Tensor | None = None
) -> TokenLoss:
    """A method's loss per token, computed in float32 or, for float64 inputs, in float64.

    Args:
        method: the method.
        config: its configuration.
        tokens: the tokens.
        decision: what the controller decided.
        rollout_is_weights: factors on every token's loss and gradient, (sequences, length), or None.
    """
    bounds = Bounds(
        *controller_of(method, config).token_bounds(
            decision, log_prob=tokens.log_prob, old_log_prob=tokens.old_log_prob, dtype=tokens.ratio.dtype
        )
    )
    offered = {**values(config), **tokens._asdict(), "bounds": bounds}
    if "log_ratio_clamp" in parameter_names(method.gradient_weight):
        offered["ratio"] = tokens.free_ratio
    weight = call_by_name(method.gradient_weight, offered)
    gradient = kept(weight * tokens.advantages, tokens.bits)
    if method.loss_value is None:
        value = -gradient
    else:
        value = kept(call_by_name(method.loss_value, {**offered, "weight": weight}), tokens.bits)
    if rollout_is_weights is not None:
        factor = kept(rollout_is_weights.detach().to(weight.dtype), tokens.bits)
        value, gradient = value.mul_(factor), gradient.mul_(factor)
    return TokenLoss(value, gradient, weight, bounds)


def sums_of(
    config: MethodConfig, tokens: Tokens, weight: Tensor, bounds: Bounds, counted: Tensor | None = None
) -> Tensor:
    """`token_sums` of a loss.

    Args:
        config: the method's configuration.
        tokens: the tokens.
        weight, bounds: their gradient weights and clip bounds.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.
    """
    advantages, bits = tokens.advantages, tokens.bits
    if counted is not None:
        bits = bits & as_bits(counted, tokens.ratio.dtype)
        advantages = kept(advantages, bits)
    return token_sums(
        ratio=tokens.ratio,
        log_ratio=tokens.log_ratio,
        advantages=advantages,
        weight=weight,
        bounds=bounds,
        bits=bits,
        dual_clip=getattr(config, "dual_clip", None),
    )


def row_blocks(sequences: int, length: int) -> list[slice]:
    """Cuts a micro-batch into blocks of about BLOCK_TOKENS tokens, at least one sequence each."""
    rows = max(BLOCK_TOKENS // max(length, 1), 1)
    return [slice(first, first + rows) for first in range(0, max(sequences, 1), rows)]


def selected_tokens(
    selection: SelectionConfig, entropy: Tensor | None, mask: Tensor, micro_batch: MicroBatch | None
) -> Tensor:
    """The tokens that entropy selection keeps.

    Args:
        selection: its configuration.
        entropy: the current policy's entropy, (sequences, length), or None.
        mask: bool, (sequences, length).
        micro_batch: carries the threshold over the mini-batch; without one it is taken from these tokens.

    Returns:
        bool, (sequences, length).

    Raises:
        ValueError: there is no entropy.
    """
    if entropy is None:
        raise ValueError(
            "clipx.select needs the policy's entropy: inside verl the plugin's training worker provides it; "
            "when you call the loss yourself, pass entropy=."
        )
    if selection.over == "sequence":
        return select_per_sequence(entropy, mask, keep=selection.keep, fraction=selection.ratio)
    bucket = None if micro_batch is None else micro_batch.entropy_bucket
    if bucket is None:
        histogram = entropy_statistics(entropy, mask)
        bucket, _ = entropy_threshold(histogram, keep=selection.keep, fraction=selection.ratio)
    return select_by_threshold(entropy, mask, bucket, keep=selection.keep)


def config_without_group(method: Method, actor: Any) -> MethodConfig:
    """The configuration when `loss_mode` was set without a `+clipx=<method>` group.

    Args:
        method: the method.
        actor: verl's ActorConfig, whose clip_ratio_low and clip_ratio_high become fixed bounds; its clip_ratio_c
            becomes GRPO's dual clip.

    Returns:
        The method's defaults with verl's own bounds where the method has fixed ones.
    """
    names = values(method.config())
    overrides: dict[str, float] = {}
    if "clip_low" in names:
        low, high = actor.get("clip_ratio_low", None), actor.get("clip_ratio_high", None)
        overrides["clip_low"] = 1 - (actor.clip_ratio if low is None else low)
        overrides["clip_high"] = 1 + (actor.clip_ratio if high is None else high)
    if method.name == "grpo":
        overrides["dual_clip"] = actor.get("clip_ratio_c", 3.0)
    return method.config(**overrides)


def configuration(registered: str, actor: Any) -> tuple[Method, MethodConfig]:
    """The method and its configuration for a call from verl.

    Args:
        registered: the method's name without prefix, or "custom".
        actor: verl's ActorConfig.

    Raises:
        ValueError: the loss mode and the clipx node name different methods, or "custom" has no node.
    """
    node = actor.policy_loss.get("clipx", None) if hasattr(actor, "policy_loss") else None
    if isinstance(node, MethodConfig):
        if registered not in ("custom", node.method):
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode=clipx_{registered} but clipx.method={node.method}: "
                f"choose the method by its group alone (+clipx={node.method})."
            )
        return METHODS[node.method], node
    if registered == "custom":
        raise ValueError("loss_mode=clipx_custom needs clipx.function: add +clipx=custom clipx.function=module:name.")
    return METHODS[registered], config_without_group(METHODS[registered], actor)


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
    entropy: Tensor | None = None,
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
        entropy: the current policy's entropy, (sequences, response length), for entropy selection outside a worker.

    Returns:
        The scalar loss, and the metrics as floats. Inside a training worker of the plugin the metrics are left in the
        current micro-batch instead, because only the worker can make them exact over the mini-batch.

    Raises:
        ValueError: no config; or `seq-mean-token-sum-norm` without loss_scale_factor, which verl would replace by the
            padded length of the micro-batch.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    if config is None:
        raise ValueError(f"clipx_{registered} needs verl's ActorConfig: pass config=.")
    if loss_agg_mode == "seq-mean-token-sum-norm" and config.get("loss_scale_factor", None) is None:
        raise ValueError(
            "actor_rollout_ref.actor.loss_scale_factor=null: seq-mean-token-sum-norm would divide by the padded length "
            "of each micro-batch; set it to a constant, for example data.max_response_length."
        )
    method, settings = configuration(registered, config)
    micro_batch = current_micro_batch()
    known = micro_batch or MicroBatch(entropy=entropy)
    mask = response_mask.bool()
    inputs = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "mask": mask,
        "rollout_log_prob": known.rollout_log_prob,
    }
    blocks = row_blocks(*mask.shape)

    def tokens_in(rows: slice) -> Tokens:
        return tokens_of(settings, **{name: part(tensor, rows) for name, tensor in inputs.items()})

    controller = controller_of(method, settings)
    statistics, observed = known.statistics, None
    if known.observe or statistics is None:
        observed = torch.zeros(controller.statistics_size, dtype=torch.float64, device=mask.device)
        for rows in blocks if len(observed) else ():
            observed += statistics_of(method, settings, tokens_in(rows), part(known.counted, rows))
        statistics = observed if statistics is None else statistics
    decision = controller.decide(statistics) if known.decision is None else known.decision

    counted = mask if known.counted is None else mask & known.counted
    value, gradient = torch.empty(2, *mask.shape, dtype=compute_dtype(log_prob.dtype), device=mask.device)
    totals = torch.zeros(len(COUNTED) + len(SUMMED), dtype=torch.float64, device=mask.device)
    for rows in blocks:
        tokens = tokens_in(rows)
        value[rows], gradient[rows], weight, bounds = token_loss(
            method, settings, tokens, decision, part(rollout_is_weights, rows)
        )
        totals += sums_of(settings, tokens, weight, bounds, part(known.counted, rows))
    sums = token_metrics(totals)

    # For verl's aggregation: the matrix, the tokens it is averaged over, and their number over the mini-batch.
    matrix, averaged = per_token_loss(log_prob, value, gradient), mask
    normalisers = {"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info}
    if settings.select is not None:
        selected = selected_tokens(settings.select, known.entropy, mask, micro_batch)
        sums["clipx/selected_fraction"] = (selected & counted).sum(dtype=torch.float64)
        matrix = torch.where(selected, matrix, 0)
        if settings.select.normaliser == "selected":
            averaged = selected
            if known.selected_tokens is not None:
                normalisers["batch_num_tokens"] = known.selected_tokens
    loss = agg_loss(loss_mat=matrix, loss_mask=averaged, loss_agg_mode=loss_agg_mode, **normalisers)
    if known.age is not None:
        rollout = known.rollout_log_prob
        moved = None if rollout is None else torch.where(mask, log_prob.detach() - rollout, 0)
        sums |= staleness_sums(known.age, log_ratio=moved, mask=counted)
    decided = {f"clipx/{name}": tensor for name, tensor in controller.metrics(statistics, decision).items()}
    host_sums, host_values = to_host(sums, decided)
    if micro_batch is not None:
        micro_batch.sums.update(host_sums)
        micro_batch.values.update(host_values)
        micro_batch.observed = observed
        return loss, {}
    token_count = max(host_sums.pop(TOKENS), 1.0)
    return loss, {**{name: total / token_count for name, total in host_sums.items()}, **host_values}


def part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """Some sequences of a tensor that may not be there."""
    return None if tensor is None else tensor[rows]
