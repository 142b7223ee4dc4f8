"""A run's first optimizer steps without a model: the plugin's plan, verl's ppo_loss, verl's registry.

A micro-batch as verl's engine makes it goes through the calls of the training worker, with the log-probabilities of a
policy that has moved as the model's output. What is not real: the engine, which here has one micro-batch, and the
ranks, of which there is one.
"""

from functools import partial

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from tests.jagged import micro_batch
from tests.training.worker import updates
from tests.training.worker.updates import ROWS, WHOLE, loss_function, run_extra_pass
from verl_clipx.run.config import Observe
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.plan import plan_step, token_passes
from verl_clipx.training.worker.registry import is_ours
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import RolloutBatch

# Log-ratios of a sequence's tokens: at ratio 1, between and beyond all usual bounds; then also beyond verl's clamp.
NEAR_OLD_POLICY = (0.0, 0.15, -0.15, 0.5, -0.7, 1.5, -3.0, 0.05, -0.4)
FAR_FROM_OLD_POLICY = (0.0, 0.15, -0.15, 0.5, 25.0, -25.0, 1.5, -3.0, -0.4)


def make_batch(log_ratios: tuple[float, ...]) -> dict[str, Tensor]:
    """Six ragged sequences of either sign of advantage, the last one without a token that counts; float32."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.tensor(log_ratios).repeat(6, 1)
    # Probabilities from nearly 1 to nearly 0, under both policies at most 1.
    old = -3 * torch.rand(6, 9, generator=generator) - log_ratio.clamp(min=0)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.3])[:, None].expand(6, 9).clone()
    lengths = torch.tensor([9, 9, 7, 7, 5, 0])
    return {
        "old_log_prob": old,
        "log_prob": old + log_ratio,
        "advantages": advantages,
        "mask": torch.arange(9) < lengths[:, None],
        "entropy": 3 * torch.rand(6, 9, generator=generator),
    }


# What verl's ppo_loss and the plugin read of the ActorConfig.
FIELDS_READ = (
    "policy_loss",
    "loss_agg_mode",
    "loss_scale_factor",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_type",
    "kl_loss_coef",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
)
_METRICS_BY_FIELDS: dict[str, list[dict[str, float]]] = {}


def train_once(actor: ActorConfig) -> list[dict[str, float]]:
    """Return `train(actor)`, computed once for all actors that agree in `FIELDS_READ`.

    Different overrides may lead to the same fields. The callers share the result, and must not change it.
    """
    key = repr([getattr(actor, name) for name in FIELDS_READ])
    if key not in _METRICS_BY_FIELDS:
        _METRICS_BY_FIELDS[key] = train(actor)
    return _METRICS_BY_FIELDS[key]


def train(actor: ActorConfig) -> list[dict[str, float]]:
    """The metrics of each optimizer step on a rollout batch that is far from the old policy; with Lopti, of its passes.

    Under scope=lagged a rollout batch near the old policy comes before it, from which it has its bounds. +clipx=observe
    stays near it: far away not all of verl's losses are finite. Fails if another loss is registered, something is not
    finite, or no token of any step got a gradient.
    """
    policy_loss = actor.policy_loss
    settings = policy_loss.clipx
    loss_mode = policy_loss.loss_mode
    is_observed = isinstance(settings, Observe)
    assert is_ours(get_policy_loss_fn(loss_mode)) != is_observed, loss_mode
    if is_observed:
        observe_registered(loss_mode)
        rollout_batches = [NEAR_OLD_POLICY]
        passes = [None]
    else:
        rollout_batches = [FAR_FROM_OLD_POLICY]
        if settings.scope == "lagged":
            rollout_batches.insert(0, NEAR_OLD_POLICY)
        passes = token_passes(policy_loss)
    state = ControllerState()
    metrics_of_steps = []
    has_gradient = False
    for log_ratios in rollout_batches:
        batch = make_batch(log_ratios)
        for token_pass in passes:
            # Not the first update, whose ratio is 1 where a rollout batch gets one update.
            rollout_batch = RolloutBatch(token_pass=token_pass, update=1)
            step = None
            if not is_observed:
                step = plan_step(
                    policy_loss,
                    state,
                    rollout_batch,
                    micro_batch(batch, ROWS)[0],
                    extra_pass=partial(run_extra_pass, policy_loss, batch, WHOLE),
                    all_reduce=lambda vector: vector,
                )
            outputs = {"entropy": batch["entropy"], "reference": batch["log_prob"] - 0.1}
            loss, gradient, metrics = updates.train(loss_function(actor, step), batch, **outputs)
            if not is_observed:
                state.end_step(step, rollout_batch.position)
            place = f"step {len(metrics_of_steps)}"
            assert loss.isfinite(), f"{place}: the loss is {loss}"
            assert gradient.isfinite().all(), f"{place}: the gradient is {gradient}"
            not_finite = {key: value for key, value in metrics.items() if not abs(float(value)) < float("inf")}
            assert not not_finite, f"{place}: {not_finite}"
            has_gradient |= bool(gradient.any())
            metrics_of_steps.append(metrics)
    assert has_gradient, "no token got a gradient"
    return metrics_of_steps
