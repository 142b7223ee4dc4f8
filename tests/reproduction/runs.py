"""Configurations for the estimator's tests: verl's own main one, with a machine and a method on top."""

from functools import cache
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

CONFIGS = Path(__file__).parents[2] / "configs"
VERL_CONFIGS = Path(verl.__file__).parent / "trainer" / "config"

# DGPO's batches: 512 prompts, 32 of them a mini-batch, 8 responses each.
BATCHES = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=8192",
    "data.train_files=/nowhere/train.parquet",
    "data.val_files=/nowhere/test.parquet",
]


@cache
def composed(model: str, *overrides: str, hardware: str = "a100x8") -> DictConfig:
    """A run, not to be changed, of GRPO with DGPO's batches.

    Args:
        model: name of the model.
        overrides: Hydra overrides.
        hardware: name of the machine's group.
    """
    groups = [f"hydra.searchpath=[file://{CONFIGS}]", f"+hardware={hardware}"]
    if not any(override.startswith("+clipx=") for override in overrides):
        groups.append("+clipx=grpo")
    with initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        return compose("ppo_trainer", [*groups, f"actor_rollout_ref.model.path={model}", *BATCHES, *overrides])
