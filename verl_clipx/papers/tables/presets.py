"""Composes presets as verl's main would."""

from collections.abc import Sequence
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from verl_clipx.papers.tables.origins import read_origins
from verl_clipx.run.presets import preset_names


def compose_preset(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a preset onto verl's own ppo_trainer configuration, as its main would. Nothing is started.

    Groups among the overrides, such as +hardware=a100x8, are merged before the preset: if both set a key, the preset's
    value wins. Values among the overrides, such as clipx.alpha=2, win over everything.

    Returns:
        verl's whole configuration, interpolations unresolved.

    Raises:
        ValueError: there is no such preset; the message names similar ones.
        hydra.errors.HydraException: an override does not fit; the message is Hydra's.
    """
    from hydra import compose, initialize_config_module

    names = preset_names()
    if name not in names:
        near = get_close_matches(name, names, n=3) or names[:3]
        raise ValueError(
            f"preset {name!r} is unknown; did you mean {', '.join(near)}? clipx papers recipe list names them all."
        )
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides, f"+recipe={name}"])


def check_method(config: DictConfig) -> None:
    """Refuse parameters of the method that a launch would refuse. A method with open bounds is not checked.

    Raises:
        ValueError: a parameter is wrong; the message names the key, the value and what is allowed.
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


def updates_a_step(config: DictConfig) -> int | None:
    """Return the optimizer updates of a step as the run's schedule counts them; None if the batches are not set."""
    from verl_clipx.run.keys import read
    from verl_clipx.run.schedule import counted_schedule

    return counted_schedule(read(config), OmegaConf.select(config, "clipx.update.order")).updates_a_step


def values_of(name: str) -> DictConfig:
    """Return the values that a preset's own parts set, without verl's defaults and with interpolations unresolved."""
    values = OmegaConf.create()
    for origin in read_origins(name).values():
        OmegaConf.update(values, origin.key, origin.value, force_add=True)
    return values
