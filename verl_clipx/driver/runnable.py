"""Refuses at the start configurations that verl would refuse only minutes later, or would silently ignore.

verl decides which values are allowed, by its registries of losses and trainers and by the checks of its rollout
correction.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from verl_clipx.base.method import NODE
from verl_clipx.driver.clip_keys import ACTOR, DRO_BETA, MISPLACED, written
from verl_clipx.driver.config import Observe, Settings
from verl_clipx.driver.listing import OBSERVE
from verl_clipx.driver.support import BYPASS, ROLLOUT_IS, ROLLOUT_RS, USE_V1, WITH_ROLLOUT_IS, WITH_ROLLOUT_RS

CALCULATE_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
TRAINER_MODE = "trainer.v1.trainer_mode"
# Keys in the configurations of verl's experimental trainers, which do not read trainer.v1.
OF_EXPERIMENTAL = ("rollout", "async_training")


def what_stops(config: DictConfig, node: Settings | Observe) -> list[str]:
    """The reasons why a run cannot be what its configuration says.

    Args:
        config: verl's whole configuration.

    Returns:
        One message for each reason, with the keys, their values and what to do.
    """
    found = [no_update(config), unknown_trainer(config), without_log_probs(config), *refused_corrections(config)]
    if isinstance(node, Observe):
        found += [unknown_loss(config), without_penalty(config), *misplaced_temperatures(config)]
    return [message for message in found if message is not None]


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
