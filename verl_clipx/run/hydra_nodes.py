"""The targets of the Hydra groups' `_target_`: the clipx node, and verl's policy_loss node around it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from verl.workers.config.actor import PolicyLossConfig

from verl_clipx.base.method import NODE
from verl_clipx.run.clip_keys import DRO_BETA, VERL_DEFAULTS, ignored_keys, sources, taken_over
from verl_clipx.run.config import NODES, Observe, Settings, build
from verl_clipx.run.listing import OBSERVE
from verl_clipx.run.support import TORCH_COMPILE, asking_for_rollout_log_probs, refuse_unserved

__all__ = ["ClipxPolicyLossConfig", "RunFacts", "build"]


@dataclass
class RunFacts:
    """The other parts of the run's configuration that the losses depend on. The groups fill them by interpolation.

    Args:
        group: the group that was chosen (+clipx=<group>), or None if unknown; filled in by the driver.
        taken: from the method's parameters to verl's key and value that they come from; filled in by the driver.
        clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c: verl's own clip keys.
        tau_pos, tau_neg: the temperatures of verl's own SAPO.
        dro_beta: the penalty of verl's own DRO.
        loss_agg_mode: verl's aggregation mode.
        paper_loss_agg_mode: the mode in which the method's paper averages, or None if its group does not say so.
        loss_scale_factor: verl's constant for seq-mean-token-sum-norm, or None.
        rollout_log_probs: whether the rollout returns its log-probabilities.
        use_v1: whether verl's v1 trainer runs, or None if unknown.
        trainer_mode: the v1 trainer's mode.
        rollout_nodes: the nodes of the rollout under verl's experimental trainers; None under others.
        bypass: whether the rollout's log-probabilities serve as the old policy's.
        rollout_prompts: the number of prompts in a rollout batch, or None if unknown.
        parameter_sync_step: how many parts the v1 trainer cuts a rollout batch into.
        steps_a_version: how many steps of the fully asynchronous trainer use one weight version and are logged as one.
        mini_batch_prompts: the number of prompts in an optimizer mini-batch, or None if unknown.
        epochs: the number of passes over a rollout batch.
        critic_warmup: training steps before this one train only the critic.
        mini_batches_at_once: how many mini-batches verl's fully asynchronous trainer fetches for each of its steps;
            None under other trainers.
        options: the keys of `support.READ` with their values.
    """

    group: str | None = None
    taken: dict[str, str] = field(default_factory=dict)
    clip_ratio: Any = VERL_DEFAULTS["clip_ratio"]
    clip_ratio_low: Any = VERL_DEFAULTS["clip_ratio_low"]
    clip_ratio_high: Any = VERL_DEFAULTS["clip_ratio_high"]
    clip_ratio_c: Any = VERL_DEFAULTS["clip_ratio_c"]
    tau_pos: Any = VERL_DEFAULTS["tau_pos"]
    tau_neg: Any = VERL_DEFAULTS["tau_neg"]
    dro_beta: Any = None
    loss_agg_mode: str = "token-mean"
    paper_loss_agg_mode: str | None = None
    loss_scale_factor: Any = None
    rollout_log_probs: bool = False
    use_v1: bool | None = None
    trainer_mode: str | None = None
    rollout_nodes: int | None = None
    bypass: bool = False
    rollout_prompts: int | None = None
    parameter_sync_step: int = 1
    steps_a_version: int = 1
    mini_batch_prompts: int | None = None
    epochs: int = 1
    critic_warmup: int = 0
    mini_batches_at_once: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def clip_keys(self) -> dict[str, Any]:
        """The keys that methods may take over, with their values."""
        return {key: getattr(self, key) for key in VERL_DEFAULTS} | {DRO_BETA: self.dro_beta}

    @property
    def uses_v1(self) -> bool:
        """Whether the trainer reads the keys of trainer.v1."""
        # The experimental trainers inherit these keys and trainer.use_v1=True, but do not read them.
        return self.use_v1 is not False and self.rollout_nodes is None and not self.mini_batches_at_once

    @property
    def parts(self) -> int:
        """How many parts the trainer cuts a rollout batch into; the worker is called once for each."""
        return (self.parameter_sync_step or 1) if self.uses_v1 else 1

    @property
    def updates(self) -> int | None:
        """The number of optimizer steps on each rollout batch as the worker gets it, or None if unknown."""
        if self.mini_batches_at_once:
            return self.mini_batches_at_once * self.epochs
        if not self.rollout_prompts or not self.mini_batch_prompts:
            return None
        prompts = self.rollout_prompts / self.parts
        return math.ceil(prompts / self.mini_batch_prompts) * self.epochs

    @property
    def uncompiled_by(self) -> str | None:
        """The first of verl's own switches of torch.compile that is off, which clipx.compile=auto follows, or None."""
        return next((key for key in TORCH_COMPILE if self.options.get(key) is False), None)

    @property
    def batches_a_step(self) -> int:
        """How many rollout batches, as the worker gets them, belong to one logged step and to one weight version."""
        return self.parts * (self.steps_a_version or 1)

    @property
    def old_policy_starts_the_update(self) -> bool:
        """Whether old_log_probs come from the same weights that a rollout batch's first update starts from."""
        in_step = not self.uses_v1 or self.trainer_mode in ("sync", "colocate_async")
        return in_step and not self.bypass and not self.mini_batches_at_once

    @property
    def makes_one_update(self) -> bool:
        """Whether each rollout batch gets a single update, which starts at ratio 1."""
        return self.old_policy_starts_the_update and self.updates == 1


@dataclass
class ClipxPolicyLossConfig(PolicyLossConfig):
    """verl's PolicyLossConfig with the plugin's configuration beside it.

    verl builds it in the driver before Ray starts, so mistakes are reported there.

    Args:
        clipx: the clipx node.
        run: the other parts of the run's configuration that the loss depends on.

    Raises:
        ValueError: there is no method, the node contradicts the run, or the run lacks what the method needs. The
            message names the key, the value and what to do.
    """

    clipx: Settings | Observe | None = None
    run: RunFacts = field(default_factory=RunFacts)

    def __post_init__(self):
        if isinstance(self.clipx, Settings | Observe) and self.clipx.compile == "auto" and self.run.uncompiled_by:
            object.__setattr__(self, "clipx", replace(self.clipx, compile=False))
        if isinstance(self.clipx, Observe):
            require_loss_of_verl(self.loss_mode)
            refuse_unserved(self.run.options, self.clipx)
            return
        if not isinstance(self.clipx, Settings):
            raise ValueError(missing_method(self.clipx))
        if other := another_loss(self.loss_mode, self.clipx):
            raise ValueError(other)
        if ignored := ignored_keys(self.clipx.method, self, group=self.run.group):
            raise ValueError("\n".join(ignored))
        check_run(self.clipx, self.run)
        refuse_unserved(self.run.options, self.clipx)
        # Once the driver has decided, nothing is left to take over.
        taken = taken_over(self.clipx.method, self.run.clip_keys, group=self.run.group)
        bounds = {name: of.value for name, of in taken.items()}
        object.__setattr__(self, "clipx", replace(self.clipx, method=replace(self.clipx.method, **bounds)))
        object.__setattr__(self, "run", replace(self.run, taken={**self.run.taken, **sources(taken)}))


def another_loss(loss_mode: str, settings: Settings) -> str | None:
    """The message if loss_mode names another loss than the clipx node does; None if they agree."""
    name = settings.method.name
    if loss_mode in ("clipx_custom", f"clipx_{name}"):
        return None
    return (
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} but {NODE}.method={name}: they contradict each "
        f"other. Choose the method only by its group (+clipx={name})."
    )


def missing_method(node: Any) -> str:
    """The message for a clipx node, or a part of one, without a method."""
    given = [f"+{NODE}/{name}" for name in NODES if node and node.get(name) is not None]
    if given:
        return (
            f"{', '.join(given)} is added to a method, and none is chosen. Choose one as well, for example +clipx=grpo."
        )
    return f"{NODE} is missing. Choose a method by its group, for example +clipx=acpo."


def require_loss_of_verl(loss_mode: str) -> None:
    """Raises ValueError if the loss to observe is one of the plugin's own."""
    if loss_mode.startswith("clipx_"):
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} with +{NODE}={OBSERVE}: the plugin's own "
            f"losses already have these metrics. Choose the method only by its group (+clipx={loss_mode[6:]}), or "
            "observe one of verl's losses (loss_mode=vanilla)."
        )


def check_run(settings: Settings, run: RunFacts) -> None:
    """Raises if the run lacks what the method needs.

    Raises:
        ValueError: names the key, the value and what to do.
    """
    asking = asking_for_rollout_log_probs(settings.method)
    if asking and not run.rollout_log_probs:
        raise ValueError(
            f"{asking} but actor_rollout_ref.rollout.calculate_log_probs={run.rollout_log_probs}. Set it to true."
        )
    refuse_padded_length(run.loss_agg_mode, run.loss_scale_factor)


def refuse_padded_length(loss_agg_mode: str, loss_scale_factor: Any) -> None:
    """Raises if verl would divide a sum over a sequence by a length that depends on the micro-batch.

    Args:
        loss_agg_mode, loss_scale_factor: verl's.

    Raises:
        ValueError: names both keys and what to do.
    """
    if loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode} with actor_rollout_ref.actor.loss_scale_factor="
            "null: verl would divide by the padded length of each micro-batch. Set loss_scale_factor to a constant, "
            "for example ${data.max_response_length}."
        )
