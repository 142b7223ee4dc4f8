"""What a user's overrides make of verl's own trainer configuration, and fixtures of it, shared by all tests.

Hydra takes a third of a second for verl's whole configuration and a sixth of that for a group's own files. Therefore
verl's is composed once, and the files of the plugin's groups are merged onto a copy, as Hydra does with groups that
come last; the other overrides are parsed and applied by Hydra itself. tests/claims/test_groups.py compares.
"""

import copy
import functools
import pickle
import re

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from verl_clipx.losses.contract.contract import example

MICRO_BATCH = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]


def by_hydra(name: str | None, *overrides: str) -> DictConfig:
    """A composition by Hydra alone: verl's of that name, or None for what the groups' own files say."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, [*overrides])


@functools.cache
def pickled_configuration() -> bytes:
    """verl's whole configuration; a copy of it by OmegaConf takes five times as long."""
    return pickle.dumps(by_hydra("ppo_trainer", *MICRO_BATCH))


@functools.cache
def content_of_group(group: str) -> DictConfig:
    """What the files of one group say."""
    content = by_hydra(None, group)
    OmegaConf.set_struct(content, False)
    return content


def composition(*overrides: str) -> DictConfig:
    """verl's whole configuration with overrides, of which those that are groups are the plugin's."""
    groups = [override for override in overrides if re.match(r"\+[\w/]+=", override)]
    config = pickle.loads(pickled_configuration())
    OmegaConf.set_struct(config, False)
    config.merge_with(*map(content_of_group, groups))
    OmegaConf.set_struct(config, True)
    others = OverridesParser.create().parse_overrides([override for override in overrides if override not in groups])
    if not all("." in override.key_or_group for override in others):
        # A group of verl's own.
        return by_hydra("ppo_trainer", *MICRO_BATCH, *overrides)
    ConfigLoaderImpl._apply_overrides_to_config(others, config)
    return config


@functools.cache
def built_once(overrides: tuple[str, ...]) -> ActorConfig:
    """verl's ActorConfig from overrides, as its driver and its workers build it; shared, so not to be changed."""
    return omega_conf_to_dataclass(composition(*overrides).actor_rollout_ref.actor)


@pytest.fixture
def composed():
    """Composes verl's own trainer configuration with overrides, as its main does."""
    return composition


@pytest.fixture
def actor():
    """`built_once` from overrides, a copy of the test's own: a twentieth of the time of building."""
    return lambda *overrides: copy.deepcopy(built_once(overrides))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A ragged micro-batch by the names of verl's policy-loss signature."""
    batch = example()
    batch["response_mask"] = batch.pop("mask")
    return {name: batch[name] for name in ("old_log_prob", "log_prob", "advantages", "response_mask")}
