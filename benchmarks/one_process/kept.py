"""Makes a run in this process and keeps its log in one small file."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_clipx.common.files import hash_of_file, read_bytes
from verl_clipx.papers.tables.collect import commit_here, versions_here
from verl_clipx.papers.tables.presets import compose_preset
from verl_clipx.papers.tables.run_folder import keep_run, metrics_of

SEED_KEYS = ("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed")
"""The keys that recipes/common.sh sets to SEED."""

Metrics = Mapping[str, float]


def compose_here(preset: str, seed: int, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a preset for a run in this process."""
    seeds = [f"{key}={seed}" for key in SEED_KEYS]
    return compose_preset(
        preset, ["+hardware=cpu", *seeds, *overrides, "trainer.logger=[file]", "trainer.resume_mode=disable"]
    )


def describe(config: DictConfig) -> dict[str, Any]:
    """Return what a kept run records of its origin: the policy's hash, the commit and the versions."""
    policy = Path(config.actor_rollout_ref.model.path) / "model.safetensors"
    return {"policy": hash_of_file(policy), "commit": commit_here(), "versions": versions_here()}


def train_and_keep(
    path: Path,
    config: DictConfig,
    record: dict[str, Any],
    select: Callable[[Metrics], Metrics],
    trainer: type | None = None,
) -> None:
    """Train, and keep the log.

    Args:
        path: the file to write; its name ends with run_folder.KEPT.
        record: what the run is; its processor time is added as `seconds`.
        select: chooses which of a step's metrics to keep.
        trainer: see `trainer.train`.
    """
    from .trainer import train

    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        train(config, log, trainer)
        metrics = metrics_of(read_bytes(log).splitlines())
    seconds = round(time.process_time() - started, 1)
    keep_run(path, record | {"seconds": seconds}, {step: select(data) for step, data in metrics.items()})
