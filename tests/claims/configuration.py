"""A user's overrides on verl's own configuration, as the driver composes and builds them.

As tests/composition.py makes it, but for the part of verl's configuration that decides on the policy loss, and from
groups and values apart.
"""

import copy
import functools
import pickle
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from tests.composition import by_hydra, content_of_group
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run.keys import READ
from verl_clipx.run.resolve import Resolved
from verl_clipx.run.start import resolve_into_config

ACTOR = "actor_rollout_ref.actor"
MICRO_BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu=6"


def compose_by_hydra(*overrides: str) -> DictConfig:
    """Return verl's whole configuration with overrides, as its main composes it."""
    return by_hydra("ppo_trainer", MICRO_BATCH, *overrides)


@functools.cache
def pickle_parts_of_verl() -> bytes:
    """Return, pickled, what the policy loss is built from in verl's configuration without the plugin.

    Merging into the whole configuration would take long.
    """
    whole = compose_by_hydra()
    parts = OmegaConf.create()
    for key in (
        f"{ACTOR}.policy_loss",
        "algorithm.rollout_correction",
        "trainer.v1",
        "trainer.device",
        "trainer.project_name",
        "trainer.experiment_name",
        "ray_kwargs.ray_init.address",
        *(key for key in READ if OmegaConf.select(whole, key) is not None),
    ):
        OmegaConf.update(parts, key, OmegaConf.select(whole, key), force_add=True)
    return pickle.dumps(parts)


def merge(groups: Sequence[str], values: Mapping[str, Any] = MappingProxyType({})) -> DictConfig:
    """Return verl's configuration with groups merged in their order, and then values by dotted key."""
    config = pickle.loads(pickle_parts_of_verl())
    config.merge_with(*map(content_of_group, groups))
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    return config


def build_by_verl(config: DictConfig) -> ActorConfig:
    """Return verl's ActorConfig of a whole configuration, as its driver and its workers build it."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@functools.cache
def plain_actor() -> ActorConfig:
    """verl's ActorConfig of a run without the plugin."""
    return build_by_verl(compose_by_hydra())


def actor_of(config: DictConfig) -> ActorConfig:
    """Return verl's ActorConfig of a configuration that `merge` made; all but its policy loss has verl's defaults."""
    actor = copy.copy(plain_actor())
    policy_loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    object.__setattr__(actor, "policy_loss", policy_loss)
    # verl writes the mini-batch's size into it.
    object.__setattr__(actor, "global_batch_info", {})
    return actor


def parse(*overrides: str) -> dict[str, Any]:
    """Return the values of overrides KEY=VALUE by key."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): OmegaConf.from_dotlist([f"value={value}"]).value for key, _, value in pairs}


def decide(*overrides: str) -> tuple[DictConfig, Resolved | None]:
    """Return a configuration into which the driver has written its decision, and the decision.

    Args:
        overrides: groups, which begin with +clipx, and KEY=VALUE.
    """
    groups = [override for override in overrides if override.startswith("+clipx")]
    values = parse(*(override for override in overrides if override not in groups))
    config = merge(groups, values)
    names = [group.partition("=")[2] for group in groups if group.startswith("+clipx=")]
    return config, resolve_into_config(config, named=values, group=next(iter(names), None))


def refusals_in(error: BaseException | None) -> tuple[Refusal, ...]:
    """The plugin's refusals inside an error of Hydra's or OmegaConf's; empty if there are none."""
    while error is not None and not isinstance(error, Refusal):
        error = error.__cause__ or error.__context__
    return () if error is None else error.all


def find_refusals(*overrides: str) -> list[Refusal]:
    """Return what the driver refuses of overrides, as `decide` takes them; empty if it refuses nothing."""
    try:
        decide(*overrides)
    except Refusal as error:
        return list(error.all)
    return []
