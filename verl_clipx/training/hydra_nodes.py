"""What the Hydra groups name as `_target_`: the clipx node and verl's policy_loss node around it."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config.actor import PolicyLossConfig

from verl_clipx.training.config import NODE, BapoConfig, MethodConfig, values
from verl_clipx.training.hardware import require_accelerator
from verl_clipx.training.methods import method_named
from verl_clipx.training.modifiers import MODIFIERS, build_modifiers
from verl_clipx.training.parameters import reject_unknown
from verl_clipx.training.user_loss import load_method


def build(method: str | None = None, function: str | None = None, **parameters: Any) -> MethodConfig:
    """Builds and checks a method's configuration: the `_target_` of the clipx node.

    Args:
        method: name of a method of the plugin; null when `function` is given.
        function: a user's loss as `package.module:name`, decorated with `verl_clipx.register_loss`.
        parameters: the method's parameters by name.

    Returns:
        The method's configuration.

    Raises:
        ValueError: unknown method, unknown parameter, or a value of a wrong type or range; the message names the key,
            the value and what is allowed.
    """
    if method is None and function is None:
        raise ValueError(
            f"{NODE}.method=None and {NODE}.function=None: no method is chosen (+clipx=base is none, but what every "
            "method's group has in common). Choose one by its group, for example +clipx=acpo, or a loss of your own: "
            "+clipx=custom clipx.function=package.module:name."
        )
    if method is not None and function is not None:
        raise ValueError(
            f"{NODE}.method={method!r} and {NODE}.function={function!r}: choose one method by its group (+clipx=acpo), "
            "or a loss of your own (+clipx=custom clipx.function=package.module:name)."
        )
    chosen = method_named(method) if method is not None else load_method(function)
    reject_unknown(parameters, values(chosen.config()), NODE, chosen.name)
    return chosen.config(**build_modifiers(parameters))


@dataclass
class RunFacts:
    """What else of the run's configuration the losses depend on; the groups fill it by interpolation.

    Args:
        loss_agg_mode: verl's aggregation mode.
        loss_scale_factor: verl's constant for seq-mean-token-sum-norm, or None.
        rollout_log_probs: whether the rollout returns its log-probabilities.
        ray_address: the Ray cluster that the driver connects to, or None for one of its own.
        device: trainer.device, or None if unknown.
        use_v1: whether verl's v1 trainer runs, or None if unknown.
        trainer_mode: the v1 trainer's mode.
        bypass: whether the rollout's log-probabilities serve as the old policy's.
        rollout_prompts: prompts of a rollout batch, or None if unknown.
        parameter_sync_step: parts that the trainer cuts a rollout batch into.
        mini_batch_prompts: prompts of an optimizer mini-batch, or None if unknown.
        epochs: passes over a rollout batch.
    """

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: Any = None
    rollout_log_probs: bool = False
    ray_address: str | None = None
    device: str | None = None
    use_v1: bool | None = None
    trainer_mode: str | None = None
    bypass: bool = False
    rollout_prompts: int | None = None
    parameter_sync_step: int = 1
    mini_batch_prompts: int | None = None
    epochs: int = 1

    @property
    def old_policy_starts_the_update(self) -> bool:
        """Whether old_log_probs come from the very weights that a rollout batch's first update starts from."""
        return not self.bypass and (self.use_v1 is False or self.trainer_mode in ("sync", "colocate_async"))

    @property
    def makes_one_update(self) -> bool:
        """Whether each rollout batch gets one update, which starts at ratio 1."""
        if not self.rollout_prompts or not self.mini_batch_prompts:
            return False
        prompts = self.rollout_prompts / (self.parameter_sync_step or 1)
        return self.old_policy_starts_the_update and prompts <= self.mini_batch_prompts and self.epochs == 1


@dataclass
class ClipxPolicyLossConfig(PolicyLossConfig):
    """verl's PolicyLossConfig with the plugin's configuration beside it.

    verl builds it in the driver before Ray starts, so everything that is wrong is said there.

    Args:
        clipx: the method's configuration.
        run: what else of the run it depends on.

    Raises:
        ValueError: the run lacks what the method needs; the message names the key, the value and what to do.
    """

    clipx: MethodConfig | None = None
    run: RunFacts = field(default_factory=RunFacts)

    def __post_init__(self):
        if not isinstance(self.clipx, MethodConfig):
            raise ValueError(missing_method(self.clipx))
        if self.loss_mode not in ("clipx_custom", f"clipx_{self.clipx.method}"):
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.loss_mode} but {NODE}.method="
                f"{self.clipx.method}: choose the method by its group alone (+clipx={self.clipx.method})."
            )
        check_run(self.clipx, self.run)
        require_accelerator(self.run.ray_address, self.run.device)


def missing_method(node: Any) -> str:
    """What to say when there is a clipx node, or a part of one, and no method."""
    given = [f"+{NODE}/{name}" for name in MODIFIERS if node and node.get(name) is not None]
    if given:
        return f"{', '.join(given)} goes on top of a method: choose one too, for example +clipx=grpo."
    return f"{NODE} is missing: choose a method by its group, for example +clipx=acpo."


def check_run(config: MethodConfig, run: RunFacts) -> None:
    """Raises if the run lacks what the method needs.

    Args:
        config: the method's configuration.
        run: facts of the run.

    Raises:
        ValueError: names the key, the value and what to do.
    """
    if isinstance(config, BapoConfig) and config.weight == "rollout" and not run.rollout_log_probs:
        raise ValueError(
            f"{NODE}.weight=rollout but actor_rollout_ref.rollout.calculate_log_probs={run.rollout_log_probs}: "
            f"set it to true, or weigh with the old policy's probability ({NODE}.weight=old)."
        )
    if run.bypass and run.use_v1 is False:
        raise ValueError(
            "algorithm.rollout_correction.bypass_mode=True with trainer.use_v1=False: verl's older trainer then "
            f"replaces loss_mode=clipx_{config.method} by its own bypass loss. Use the v1 trainer "
            "(trainer.use_v1=True), or set bypass_mode=False."
        )
    if run.loss_agg_mode == "seq-mean-token-sum-norm" and run.loss_scale_factor is None:
        raise ValueError(
            "actor_rollout_ref.actor.loss_scale_factor=null: seq-mean-token-sum-norm would divide by the padded length "
            "of each micro-batch; set it to a constant, for example ${data.max_response_length}."
        )
