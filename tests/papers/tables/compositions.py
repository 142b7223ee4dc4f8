"""Presets on verl's configuration, each composed once in a session.

A preset is merged last, so composing its own files alone and merging them onto verl's configuration gives what Hydra
gives for both together, in a tenth of the time; test_presets.py compares the two.
"""

import functools

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_clipx.papers.tables.presets import values_of

# Folders of configs/recipe with the papers' presets.
PAPERS = ("acpo", "ar_lopti", "dgpo", "bapo")
# What a run of the ablations with fixed bounds has to measure first.
MEASURED = {"clip_high": {"clipx.clip_high": 3.5}, "clip_average": {"clipx.clip_low": 0.9, "clipx.clip_high": 1.1}}


@functools.cache
def verl_s_own(hardware: str) -> DictConfig:
    """verl's own configuration with a machine."""
    return _composed("ppo_trainer", hardware)


@functools.cache
def preset_alone(name: str) -> DictConfig:
    """The values that Hydra takes from a preset."""
    return _composed(None, f"+recipe={name}")


@functools.cache
def values(name: str) -> DictConfig:
    """What a preset sets, without Hydra."""
    return values_of(name)


@functools.cache
def on_a_machine(name: str) -> DictConfig:
    """A preset on verl's configuration with a machine, and with bounds where it leaves them open."""
    hardware = "+hardware=a100x8" if name.split("/")[0] in PAPERS else "+hardware=cpu"
    config = OmegaConf.merge(verl_s_own(hardware), preset_alone(name))
    for part, values in MEASURED.items():
        for key, value in values.items() if f"countdown_3b_{part}_" in name else ():
            OmegaConf.update(config, key, value)
    return config


def _composed(name: str | None, override: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(name, [override])
    OmegaConf.set_struct(config, False)
    return config
