"""Fixtures shared by the tests of the veRL-facing code."""

import copy
import functools

import pytest
import torch
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from verl_clipx.check.contract import example

MICRO_BATCH = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]


@functools.cache
def compose_once(overrides: tuple[str, ...]):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*MICRO_BATCH, *overrides])


@functools.cache
def built_once(overrides: tuple[str, ...]) -> ActorConfig:
    """verl's ActorConfig from overrides, as its driver and its workers build it; shared, so not to be changed."""
    return omega_conf_to_dataclass(compose_once(overrides).copy().actor_rollout_ref.actor)


@pytest.fixture
def composed():
    """Composes verl's own trainer configuration with overrides, as its main does."""
    return lambda *overrides: compose_once(overrides).copy()


@pytest.fixture
def actor():
    """`built_once` from overrides, a copy of the test's own: a two-hundredth of the time of building."""
    return lambda *overrides: copy.deepcopy(built_once(overrides))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A ragged micro-batch by the names of verl's policy-loss signature."""
    batch = example()
    batch["response_mask"] = batch.pop("mask")
    return {name: batch[name] for name in ("old_log_prob", "log_prob", "advantages", "response_mask")}
