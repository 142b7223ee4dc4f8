"""The function that verl calls: tensors of one micro-batch in, scalar loss and metrics out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.policy_gradient import per_token_loss
from verl_clipx.losses.ratio import compute_dtype, importance_ratio
from verl_clipx.training.config import MethodConfig, values
from verl_clipx.training.methods import METHODS, Method, call_by_name, controller_of, parameter_names
from verl_clipx.training.metrics import TOKENS, to_host, token_sums
from verl_clipx.training.micro_batch import current_micro_batch


class TokenLoss(NamedTuple):
    """A micro-batch's loss before aggregation.

    Args:
        loss: (sequences, length), 0 outside the mask; its gradient with respect to log_prob is -F*A.
        weight: gradient weight F, (sequences, length).
        ratio, log_ratio: importance-sampling ratio and its clamped logarithm, (sequences, length).
        advantages: (sequences, length), 0 outside the mask.
        bounds: clip bounds on the ratio.
        controller_metrics: metric name to 0-d float64 tensor.
    """

    loss: Tensor
    weight: Tensor
    ratio: Tensor
    log_ratio: Tensor
    advantages: Tensor
    bounds: Bounds
    controller_metrics: dict[str, Tensor]


def evaluate(
    method: Method,
    config: MethodConfig,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
) -> TokenLoss:
    """A method's loss per token, computed in float32 or, for float64 inputs, in float64.

    Args:
        method: the method.
        config: its configuration.
        old_log_prob, log_prob: log-probabilities under the old and the current policy, (sequences, length).
        advantages: (sequences, length).
        mask: bool, (sequences, length); values outside are never used, not even NaN.
        rollout_log_prob: log-probabilities under the rollout policy, or None.
        rollout_is_weights: factors on every token's loss and gradient, or None.

    Returns:
        Loss, weight, ratio and bounds per token.

    Raises:
        ValueError: the configuration needs rollout_log_prob and there is none.
    """
    dtype = compute_dtype(log_prob.dtype)

    def inside(tensor: Tensor) -> Tensor:
        return torch.where(mask, tensor.detach(), 0).to(dtype)

    tokens = {
        "log_prob": inside(log_prob),
        "old_log_prob": inside(old_log_prob),
        "advantages": inside(advantages),
        "rollout_log_prob": None if rollout_log_prob is None else inside(rollout_log_prob),
        "mask": mask,
    }
    parameters = values(config)
    clamp = config.log_ratio_clamp
    log_ratio, clamped = importance_ratio(tokens["log_prob"], tokens["old_log_prob"], clamp)
    ratio = clamped
    if "log_ratio_clamp" in parameter_names(method.gradient_weight):
        _, ratio = importance_ratio(tokens["log_prob"], tokens["old_log_prob"], None)

    controller = controller_of(method, config)
    statistics = call_by_name(controller.statistics, {**tokens, "ratio": clamped})
    decision = controller.decide(statistics)
    bounds = Bounds(
        *controller.token_bounds(
            decision, log_prob=tokens["log_prob"], old_log_prob=tokens["old_log_prob"], dtype=dtype
        )
    )

    offered = {**parameters, **tokens, "ratio": ratio, "bounds": bounds}
    weight = call_by_name(method.gradient_weight, offered)
    gradient = weight * tokens["advantages"]
    value = -gradient if method.loss_value is None else call_by_name(method.loss_value, {**offered, "weight": weight})
    if rollout_is_weights is not None:
        factor = inside(rollout_is_weights)
        value, gradient = value * factor, gradient * factor
    loss = per_token_loss(log_prob, torch.where(mask, value, 0), torch.where(mask, gradient, 0))
    return TokenLoss(
        loss,
        weight,
        clamped,
        log_ratio,
        tokens["advantages"],
        bounds,
        {f"clipx/{name}": tensor for name, tensor in controller.metrics(statistics, decision).items()},
    )


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
    mask = response_mask.bool()
    result = evaluate(
        method,
        settings,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        mask=mask,
        rollout_log_prob=None if micro_batch is None else micro_batch.rollout_log_prob,
        rollout_is_weights=rollout_is_weights,
    )
    loss = agg_loss(
        loss_mat=result.loss,
        loss_mask=mask,
        loss_agg_mode=loss_agg_mode,
        **{"loss_scale_factor": config.get("loss_scale_factor", None), **config.global_batch_info},
    )
    sums, controller = to_host(
        token_sums(
            ratio=result.ratio,
            log_ratio=result.log_ratio,
            advantages=result.advantages,
            weight=result.weight,
            bounds=result.bounds,
            mask=mask,
            dual_clip=getattr(settings, "dual_clip", None),
        ),
        result.controller_metrics,
    )
    if micro_batch is not None:
        micro_batch.sums.update(sums)
        micro_batch.values.update(controller)
        return loss, {}
    tokens = max(sums.pop(TOKENS), 1.0)
    return loss, {**{name: total / tokens for name, total in sums.items()}, **controller}
