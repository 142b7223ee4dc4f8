"""A run's first optimizer steps without a model: the plugin's plan, verl's ppo_loss, verl's registry.

A micro-batch as verl's engine makes it goes through the calls of the training worker, with the log-probabilities of a
policy that has moved as the model's output. What is not real: the engine, which here has one micro-batch, and the
ranks, of which there is one.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from tests.jagged import micro_batch
from tests.worker.updates import PassEngine
from verl_clipx.base.tokens import Inputs
from verl_clipx.run.config import Observe
from verl_clipx.worker.extra_pass import extra_pass
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.loss_function import with_micro_batch
from verl_clipx.worker.observe import observe_registered
from verl_clipx.worker.plan import finish_step, plan_step, token_passes
from verl_clipx.worker.registry import is_ours
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import OptimizerStep, RolloutBatch

ROWS = [0, 1, 2, 3, 4, 5]

# Log-ratios of a sequence's tokens: at ratio 1, between and beyond all usual bounds; then also beyond verl's clamp.
NEAR = (0.0, 0.15, -0.15, 0.5, -0.7, 1.5, -3.0, 0.05, -0.4)
FAR = (0.0, 0.15, -0.15, 0.5, 25.0, -25.0, 1.5, -3.0, -0.4)


def moved_batch(log_ratios: tuple[float, ...]) -> dict[str, Tensor]:
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


class FirstCall(NamedTuple):
    """What came of every optimizer step: its loss, the gradient for (sequences, length) log-probabilities, metrics."""

    losses: list[Tensor]
    gradients: list[Tensor]
    metrics: list[dict[str, float]]


# What verl's ppo_loss and the plugin read of the ActorConfig.
READ = (
    *("policy_loss", "loss_agg_mode", "loss_scale_factor", "entropy_coeff"),
    *("use_kl_loss", "kl_loss_type", "kl_loss_coef"),
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
)
_FOUND: dict[str, FirstCall] = {}


def first_call(actor: ActorConfig) -> FirstCall:
    """As `train`, once for each set of what it reads: different overrides may lead to the same one."""
    key = repr([getattr(actor, name) for name in READ])
    if key not in _FOUND:
        _FOUND[key] = train(actor)
    return _FOUND[key]


def first_call_of(actor: DictConfig) -> FirstCall:
    """As `first_call`, from the actor's node; builds the ActorConfig once for each set of what is read of it."""
    # Resolved where they stand: their references lead out of the actor's node.
    read = {name: actor.get(name) for name in READ}
    key = repr(
        {name: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_dict(v) else v for name, v in read.items()}
    )
    if key not in _FOUND:
        _FOUND[key] = first_call(omega_conf_to_dataclass(actor))
    return _FOUND[key]


def alone(vector: Tensor) -> Tensor:
    """The sum over the only rank."""
    return vector


def worker_s_call(
    actor: ActorConfig,
    data: Any,
    output: dict[str, Any],
    state: ControllerState | None = None,
    token_pass: TokenPass | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's loss and metrics of one optimizer step on one micro-batch, by the calls of the training worker."""
    policy_loss, state = actor.policy_loss, state or ControllerState()

    def over_mini_batch(data: Any, step: OptimizerStep, seen: list[Inputs]) -> dict[str, Tensor]:
        return extra_pass(policy_loss, PassEngine([(data, output)]), data, step, seen, cut={}, device="cpu")

    # Not the first update, whose ratio is 1 where a rollout batch gets one update.
    at = RolloutBatch(token_pass=token_pass, update=1)
    step = plan_step(policy_loss, state, at, data, extra_pass=over_mini_batch, all_reduce=alone)
    called = with_micro_batch(partial(ppo_loss, config=actor), policy_loss.clipx, lambda: step)(output, data)
    finish_step(policy_loss.clipx, state, step, at.position)
    return called


def train(actor: ActorConfig) -> FirstCall:
    """An optimizer step on a rollout batch that is far from the old policy; with Lopti, its two passes.

    Under scope=lagged a rollout batch near the old policy comes before it, from which it has its bounds. +clipx=observe
    stays near it: far away not all of verl's losses are finite. Fails if another loss is registered, something is not
    finite, or no token of any step got a gradient.
    """
    settings, loss_mode = actor.policy_loss.clipx, actor.policy_loss.loss_mode
    observed = isinstance(settings, Observe)
    assert is_ours(get_policy_loss_fn(loss_mode)) != observed, loss_mode
    if observed:
        observe_registered(loss_mode)
    state, found = ControllerState(), FirstCall([], [], [])
    for log_ratios in (NEAR,) if observed else (NEAR, FAR) if settings.scope == "lagged" else (FAR,):
        batch = moved_batch(log_ratios)
        entropy, reference = batch["entropy"], batch["log_prob"] - 0.1
        for token_pass in [None] if observed else token_passes(actor.policy_loss):
            log_prob = batch["log_prob"].clone().requires_grad_(True)
            data, output = micro_batch({**batch, "log_prob": log_prob}, ROWS, entropy=entropy, reference=reference)
            if observed:
                loss, metrics = with_micro_batch(partial(ppo_loss, config=actor), settings)(output, data)
            else:
                loss, metrics = worker_s_call(actor, data, output, state, token_pass)
            loss.backward()
            found.losses.append(loss.detach())
            found.gradients.append(log_prob.grad)
            # What verl would log.
            numbers = {key: of.aggregate() if isinstance(of, Metric) else of for key, of in metrics.items()}
            found.metrics.append({key: float(number) for key, number in numbers.items()})
    for index, (loss, gradient, metrics) in enumerate(zip(*found, strict=True)):
        assert loss.isfinite(), f"step {index}: the loss is {loss}"
        assert gradient.isfinite().all(), f"step {index}: the gradient is {gradient}"
        broken = {key: value for key, value in metrics.items() if not abs(value) < float("inf")}
        assert not broken, f"step {index}: {broken}"
    assert any(gradient.any() for gradient in found.gradients), "no token got a gradient"
    return found
