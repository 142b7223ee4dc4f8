"""Golden vectors through the user's door: overrides in, the loss from verl's registry out."""

from dataclasses import dataclass

from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from tests.composition import built_once
from tests.golden.cases import GoldenCase
from tests.golden.settings import overrides_of
from verl_clipx.losses.applying.loss import Applied
from verl_clipx.losses.contract.contract import evaluate
from verl_clipx.run.config import Settings


@dataclass(frozen=True)
class Run:
    """What the plugin makes of a vector: as `registered_loss`, and per token, from the function behind the contract."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]
    tokens: Applied


def registered_loss(config: ActorConfig, inputs: dict[str, Tensor], **further) -> tuple[Tensor, Tensor, dict]:
    """verl's call of the loss that a configuration names: the loss, its gradient on log_prob, and the metrics.

    `further` are arguments beside the inputs, or in place of what the configuration says.
    """
    log_prob = inputs["log_prob"].clone().requires_grad_(True)
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=inputs["old_log_prob"],
        log_prob=log_prob,
        advantages=inputs["advantages"],
        response_mask=inputs["response_mask"],
        **{"loss_agg_mode": config.loss_agg_mode, "config": config, "rollout_is_weights": None, **further},
    )
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def per_token(settings: Settings, inputs: dict[str, Tensor], **further: Tensor) -> Applied:
    """Weights, bounds and statistics of a method on a vector's inputs."""
    rest = {name: tensor for name, tensor in inputs.items() if name != "response_mask"}
    shaping, mask = settings.shaping, inputs["response_mask"]
    return evaluate(settings.method, shaping=shaping, mask=mask, **rest, **further)


_runs: dict[tuple[str, tuple[str, ...]], Run] = {}


def run(case: GoldenCase, overrides: tuple[str, ...] | None = None) -> Run:
    """A vector under its own overrides, or under others, with its entropy where it has one; computed once."""
    overrides = overrides_of(case) if overrides is None else overrides
    key = (case.name, overrides)
    if key not in _runs:
        config = built_once(overrides)
        tokens = per_token(config.policy_loss.clipx, case.inputs)
        further = {"entropy": case.expected["entropy"]} if "entropy" in case.expected else {}
        loss, gradient, metrics = registered_loss(config, case.inputs, **further)
        _runs[key] = Run(loss, gradient, metrics, tokens)
    return _runs[key]
