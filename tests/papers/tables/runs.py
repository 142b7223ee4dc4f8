"""Configurations for the estimator's tests: verl's own main one, with a machine and a method on top."""

from functools import cache
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_clipx.papers.tables.cost.estimate import Estimate
from verl_clipx.papers.tables.cost.memory import Phase

CONFIGS = Path(__file__).parents[3] / "configs"
VERL_CONFIGS = Path(verl.__file__).parent / "trainer" / "config"

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

MODELS = {
    "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "3b": "Qwen/Qwen2.5-3B-Instruct",
    "7b": "Qwen/Qwen2.5-7B",
    "14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
}
PARAMETERS_7B = 7_615_616_512

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


BASE = composed(MODELS["7b"])


def changed(changes: dict, base: DictConfig = BASE) -> DictConfig:
    """A copy of a run with other values.

    Args:
        changes: values by dotted key.
        base: the run.
    """
    config = base.copy()
    with open_dict(config):
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
    return config


def phase(result: Estimate, name: str) -> Phase:
    """A phase of an estimate, by its name."""
    return next(phase for phase in result.phases if phase.name == name)
