"""How the pieces compose into a loss, as small as it can be: for tests of the pieces, not of the veRL-facing code.

sanitise -> importance_ratio -> controller -> gradient_weight -> per_token_loss -> verl's own aggregation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss

from verl_clipx.controllers.controller import Controller
from verl_clipx.losses import aspo, ce_gppo, cispo, dgpo, gppo, grpo
from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.policy_gradient import per_token_loss
from verl_clipx.losses.ratio import importance_ratio


@dataclass(frozen=True)
class Method:
    """A loss with its parameters bound.

    Attributes:
        weight: (ratio, advantages, bounds) -> F.
        value: (ratio, weight, advantages, log_prob, bounds) -> value per token.
        wants_clamped_ratio: the ratio passed to `weight` and `value` is clamped, not only saturated.
    """

    weight: Callable[[Tensor, Tensor, Bounds], Tensor]
    value: Callable[[Tensor, Tensor, Tensor, Tensor, Bounds], Tensor]
    wants_clamped_ratio: bool = False


@dataclass(frozen=True)
class Outcome:
    loss: Tensor
    gradient: Tensor
    weight: Tensor
    ratio: Tensor
    bounds: Bounds
    statistics: Tensor
    decision: Tensor


def _minus_weight_times_advantage(ratio, weight, advantages, log_prob, bounds):
    return -weight * advantages


def grpo_method(*, dual_clip: float | None = None, log_ratio_clamp: float | None = None) -> Method:
    options = {"dual_clip": dual_clip, "log_ratio_clamp": log_ratio_clamp}
    return Method(
        weight=lambda ratio, advantages, bounds: grpo.gradient_weight(ratio, advantages, bounds, **options),
        value=lambda ratio, weight, advantages, log_prob, bounds: grpo.loss_value(ratio, advantages, bounds, **options),
    )


def cispo_method(*, mask_low: float | None = None, mask_high: float | None = None) -> Method:
    return Method(
        weight=lambda ratio, advantages, bounds: cispo.gradient_weight(
            ratio, advantages, bounds, mask_low=mask_low, mask_high=mask_high
        ),
        value=lambda ratio, weight, advantages, log_prob, bounds: cispo.loss_value(weight, advantages, log_prob),
        wants_clamped_ratio=True,
    )


def _weight_only(function: Callable[..., Tensor], **options) -> Method:
    return Method(
        weight=lambda ratio, advantages, bounds: function(ratio, advantages, bounds, **options),
        value=_minus_weight_times_advantage,
    )


def gppo_method(**options) -> Method:
    return _weight_only(gppo.gradient_weight, **options)


def ce_gppo_method(**options) -> Method:
    return _weight_only(ce_gppo.gradient_weight, **options)


def aspo_method(**options) -> Method:
    return _weight_only(aspo.gradient_weight, **options)


def dgpo_method(**options) -> Method:
    return _weight_only(dgpo.gradient_weight, **options)


def compose(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    method: Method,
    controller: Controller,
    log_ratio_clamp: float | None = 20.0,
    loss_agg_mode: str = "token-mean",
    decision: Tensor | None = None,
) -> Outcome:
    """One loss and its gradient; `decision` replaces the controller's own, to hold the bounds fixed."""
    log_prob = log_prob.detach().requires_grad_()
    inside, outside = response_mask, torch.zeros((), dtype=log_prob.dtype)
    clean_log_prob = torch.where(inside, log_prob, outside)
    clean_old_log_prob = torch.where(inside, old_log_prob, outside)
    _, clamped_ratio = importance_ratio(clean_log_prob, clean_old_log_prob, log_ratio_clamp)
    _, saturated_ratio = importance_ratio(clean_log_prob, clean_old_log_prob, None)
    clean_advantages = torch.where(inside, advantages, 0.0).to(clamped_ratio.dtype)

    statistics = controller.statistics(
        ratio=clamped_ratio,
        advantages=clean_advantages,
        mask=inside,
        log_prob=clean_log_prob,
        old_log_prob=clean_old_log_prob,
        rollout_log_prob=clean_old_log_prob,
    )
    if decision is None:
        decision = controller.decide(statistics)
    bounds = Bounds(
        *controller.token_bounds(
            decision, log_prob=clean_log_prob, old_log_prob=clean_old_log_prob, dtype=clamped_ratio.dtype
        )
    )
    ratio = clamped_ratio if method.wants_clamped_ratio else saturated_ratio
    weight = method.weight(ratio, clean_advantages, bounds)
    value = method.value(ratio, weight, clean_advantages, clean_log_prob, bounds)
    matrix = per_token_loss(clean_log_prob, value, weight * clean_advantages)
    loss = agg_loss(loss_mat=matrix, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return Outcome(loss.detach(), gradient, weight, ratio, bounds, statistics, decision)
