"""Refuses at the start configurations that verl would refuse only minutes later, or would silently ignore.

verl decides which values are allowed, by its registries of losses and trainers and by the checks of its rollout
correction.
"""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_clipx.base.method import NODE
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.run.clip_keys import ACTOR, DRO_BETA, MISPLACED, OF_OTHER_LOSSES, VERL_DEFAULTS, written
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.listing import OBSERVE
from verl_clipx.run.support import BYPASS, ROLLOUT_IS, ROLLOUT_RS, USE_V1, WITH_ROLLOUT_IS, WITH_ROLLOUT_RS
from verl_clipx.run.unknown_keys import FACTS, paths

CALCULATE_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
TRAINER_MODE = "trainer.v1.trainer_mode"
# Keys in the configurations of verl's experimental trainers, which do not read trainer.v1.
OF_EXPERIMENTAL = ("rollout", "async_training")
# The nodes from which verl's policy loss reads keys, and the keys that each of them has.
READ_AT = {
    ACTOR: (
        *VERL_DEFAULTS,
        *("loss_agg_mode", "loss_scale_factor", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    ),
    f"{ACTOR}.policy_loss": ("loss_mode", "dro_beta", *OF_OTHER_LOSSES, *MISPLACED),
}
# Losses of their own, which read some of these names.
OTHER_LOSSES = {
    "critic": ("loss_agg_mode", "loss_scale_factor"),
    "distillation.distillation_loss": ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "loss_mode"),
}
# Keys in such a node belong to the code that verl passes them on to.
PASSED_ON = ("kwargs", "override")
# Groups set this one: it is about their paper, not about the run.
OF_THE_PAPER = "paper_loss_agg_mode"


def what_stops(config: DictConfig, node: Settings | Observe) -> list[str]:
    """The reasons why a run cannot be what its configuration says.

    Args:
        config: verl's whole configuration.

    Returns:
        One message for each reason, with the keys, their values and what to do.
    """
    found = [no_update(config), unknown_trainer(config), without_log_probs(config), *refused_corrections(config)]
    found += misplaced_keys(config)
    if isinstance(node, Observe):
        found += [unknown_loss(config), without_penalty(config), *misplaced_temperatures(config)]
    return [message for message in found if message is not None]


def misplaced_keys(config: DictConfig) -> list[str]:
    """Keys of the policy loss, by their names, at places where nothing reads them."""
    places: dict[str, list[str]] = {}
    for node, names in READ_AT.items():
        for name in names:
            places.setdefault(name, []).append(node)
    found = []
    for key in paths(OmegaConf.to_container(config, resolve=False)):
        node, _, name = key.rpartition(".")
        ours = key.startswith((f"{NODE}.", f"{ACTOR}.policy_loss.{NODE}.", f"{FACTS}."))
        if name not in places or ours or any(part in node for part in PASSED_ON):
            continue
        if node not in places[name] and name not in OTHER_LOSSES.get(node, ()):
            value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
            found.append(
                f"{key}={written(value)}: nothing reads it there. Set {places[name][0]}.{name}, which verl reads, or "
                f"remove {key}."
            )
    return found


def facts_set_by_hand(config: DictConfig, named: Collection[str]) -> list[str]:
    """Facts about the run that do not say what the run's configuration says, or that the command line names.

    Args:
        config: verl's whole configuration.
        named: full keys that the command line names.
    """
    facts, actor = OmegaConf.select(config, FACTS), OmegaConf.select(config, ACTOR)
    if not facts:
        return [f"{FACTS}={written(facts)}: the plugin needs these facts about the run. Remove it."]
    from_base = OmegaConf.select(OmegaConf.load(configs_folder() / NODE / "base.yaml"), FACTS)
    # Below the same node, the interpolations have the values of this configuration.
    derived = OmegaConf.create(from_base, parent=actor.policy_loss)
    by_hand = {name.removeprefix(f"{FACTS}.").partition(".")[0] for name in named if name.startswith(f"{FACTS}.")}
    return [
        f"{FACTS}.{key}={written(facts.get(key))}: the plugin reads this fact about the run from the run's other keys. "
        "Remove it, and set the key that it comes from."
        for key in dict.fromkeys([*derived, *facts])
        if key in by_hand or key not in facts or contradicts(key, facts[key], derived, actor)
    ]


def contradicts(key: str, value: Any, derived: DictConfig, actor: DictConfig) -> bool:
    """Whether a fact about the run is not what the run's configuration says.

    Args:
        key, value: the fact.
        derived: all facts, as the configuration gives them.
        actor: verl's actor node.
    """
    # The driver fills the group in, and the methods' groups the paper's mode.
    if key in ("group", OF_THE_PAPER):
        return False
    if key != "taken":
        return key not in derived or value != derived[key]
    sources = [source.partition("=") for source in (value or {}).values()]
    # The driver removes verl's misplaced keys once it has taken them over.
    popped = [f"policy_loss.{name}" for name in MISPLACED]
    return any(of not in popped and written(OmegaConf.select(actor, of)) != given for of, _, given in sources)


def no_update(config: DictConfig) -> str | None:
    """A number of epochs that is not a whole number of at least 1."""
    epochs = OmegaConf.select(config, f"{ACTOR}.ppo_epochs")
    if epochs is None or (isinstance(epochs, int) and epochs >= 1):
        return None
    return f"{ACTOR}.ppo_epochs={epochs}: no update would be made. Set it to a whole number of at least 1."


def unknown_loss(config: DictConfig) -> str | None:
    """A loss to observe that is not in verl's registry."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    key = f"{ACTOR}.policy_loss.loss_mode"
    loss_mode = OmegaConf.select(config, key)
    # The plugin's own losses are refused when the node is built, registered or not.
    if loss_mode in POLICY_LOSS_REGISTRY or str(loss_mode).startswith(f"{NODE}_"):
        return None
    known = ", ".join(sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(f"{NODE}_")))
    return (
        f"{key}={loss_mode} with +{NODE}={OBSERVE}: verl has no such loss to observe. Set {key} to one of "
        f"{known}, or name the module that registers it in VERL_USE_EXTERNAL_MODULES."
    )


def without_penalty(config: DictConfig) -> str | None:
    """verl's own DRO without a penalty, which would stop in its first loss call."""
    keys = [f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.{DRO_BETA}"]
    loss_mode, beta = (OmegaConf.select(config, key) for key in keys)
    if loss_mode != "dro" or (isinstance(beta, int | float) and beta > 0):
        return None
    return f"{keys[0]}=dro with {keys[1]}={written(beta)}: verl's dro needs a penalty above 0. Set {keys[1]}=0.05."


def misplaced_temperatures(config: DictConfig) -> list[str]:
    """SAPO's temperatures under policy_loss, where verl's scripts write them but verl has no such keys."""
    node = OmegaConf.select(config, f"{ACTOR}.policy_loss")
    return [
        f"{ACTOR}.policy_loss.{key}={written(node[key])} with +{NODE}={OBSERVE}: verl does not have this key and "
        f"would stop. Set {ACTOR}.{key}, which its sapo reads."
        for key in MISPLACED
        if key in node
    ]


def unknown_trainer(config: DictConfig) -> str | None:
    """A mode of the v1 trainer for which no trainer is registered."""
    mode = OmegaConf.select(config, TRAINER_MODE)
    if mode is None or not OmegaConf.select(config, USE_V1) or any(key in config for key in OF_EXPERIMENTAL):
        return None
    if is_registered_in_the_source(mode):
        return None
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    if mode in TRAINER_REGISTRY:
        return None
    return (
        f"{TRAINER_MODE}={mode} with {USE_V1}=True: verl has no such trainer. Set {TRAINER_MODE} to one of "
        f"{', '.join(sorted(TRAINER_REGISTRY))}, or {USE_V1}=False for the older trainer, which has no modes."
    )


def is_registered_in_the_source(mode: str) -> bool:
    """Whether one of verl's trainers registers a mode, by its source, because importing the trainers takes seconds."""
    folder = Path(find_spec("verl.trainer.ppo").origin).parent / "v1"
    return any(f'@register_trainer("{mode}")' in path.read_text() for path in folder.glob("*.py"))


def without_log_probs(config: DictConfig) -> str | None:
    """Options that need the rollout's log-probabilities, if the rollout does not return them."""
    returned = OmegaConf.select(config, CALCULATE_LOG_PROBS)
    if returned is None or returned:
        return None
    needing = [f"{key}={value}" for key in (BYPASS, ROLLOUT_IS, ROLLOUT_RS) if (value := OmegaConf.select(config, key))]
    if not needing:
        return None
    switches = f"{BYPASS}=False" if needing[0].startswith(BYPASS) else f"{needing[0].partition('=')[0]}=null"
    return (
        f"{', '.join(needing)} with {CALCULATE_LOG_PROBS}={returned}: this needs the rollout's log-probabilities, "
        f"which it would not return. Set {CALCULATE_LOG_PROBS}=True, or {switches}."
    )


def refused_corrections(config: DictConfig) -> list[str]:
    """verl's objections to the weights and to the rejection of rollout correction, each tried on two sequences.

    During a run, verl would refuse them only with the first batch.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    found = []
    for correct, key, with_key in (
        (compute_rollout_correction_weights, ROLLOUT_IS, WITH_ROLLOUT_IS[:1]),
        (compute_rollout_rejection_mask, ROLLOUT_RS, WITH_ROLLOUT_RS),
    ):
        settings = {name: OmegaConf.select(config, name) for name in (key, *with_key)}
        if settings[key] is None:
            continue
        by_last_word = {name.rpartition(".")[2]: value for name, value in settings.items()}
        try:
            correct(torch.zeros(2, 2), torch.ones(2, 2), **by_last_word)
        except (ValueError, TypeError) as error:
            said = ", ".join(f"{name}={value}" for name, value in settings.items())
            found.append(f"{said}: verl's rollout correction refuses it: {error} Change it, or set {key}=null.")
    return found
