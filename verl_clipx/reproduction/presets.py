"""The run presets, the rows of configs/recipe: which there are, what each is about, and composing one as verl's main
would."""

from collections.abc import Sequence
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from verl_clipx.reproduction.origins import read_origins
from verl_clipx.reproduction.rows import preset_names

PAPERS = ("acpo", "ar_lopti", "dgpo", "bapo")
"""Folders of configs/recipe that hold the papers' runs."""


def compose_preset(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Composes a preset onto verl's own ppo_trainer configuration, as its main would; starts nothing.

    Groups among the overrides, such as +hardware=a100x8, are merged before the preset, so that where both set a key
    the preset's value stays. Values among them, such as clipx.alpha=2, win over everything.

    Returns:
        verl's whole configuration, interpolations unresolved.

    Raises:
        ValueError: there is no such preset; the message names the nearest ones.
        hydra.errors.HydraException: an override does not fit; the message is Hydra's.
    """
    from hydra import compose, initialize_config_module

    names = preset_names()
    if name not in names:
        near = get_close_matches(name, names, n=3) or names[:3]
        raise ValueError(
            f"preset {name!r} is unknown; did you mean {', '.join(near)}? clipx recipe list names them all."
        )
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides, f"+recipe={name}"])


def check_method(config: DictConfig) -> None:
    """Refuses parameters of the method that a launch would refuse. Bounds that are left open are not looked at.

    Raises:
        ValueError: names key, value and what is allowed.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    node = OmegaConf.select(config, "clipx")
    if node is None or OmegaConf.missing_keys(node):
        return
    try:
        instantiate(node)
    except InstantiationException as error:
        raise ValueError(str(error.__cause__ or error)) from None


def updates_per_rollout(config: DictConfig) -> int:
    """Optimizer steps of a rollout batch: its mini-batches, times passes over it, times two with Lopti."""
    actor = config.actor_rollout_ref.actor
    mini_batches = -(-config.data.train_batch_size // actor.ppo_mini_batch_size)
    return mini_batches * (actor.get("ppo_epochs") or 1) * lopti_passes(config)


def lopti_passes(config: DictConfig) -> int:
    """Passes over a rollout batch: 2 with Lopti, 1 without it or with its first pass alone."""
    return 2 if OmegaConf.select(config, "clipx.update.order") in ("low_first", "high_first") else 1


def values_of(name: str) -> DictConfig:
    """What a preset's own parts set, without verl's defaults, interpolations unresolved."""
    values = OmegaConf.create()
    for origin in read_origins(name).values():
        OmegaConf.update(values, origin.key, origin.value, force_add=True)
    return values
