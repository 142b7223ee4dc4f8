"""Makes a run in this process and keeps its log in one small file."""

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_clipx.analysis.runs.folder import KEPT, run_path
from verl_clipx.analysis.runs.run_log import read_log
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import hash_of_file, hash_of_json, replacing
from verl_clipx.papers.tables.collect import CONFIGURATIONS, read_configurations
from verl_clipx.papers.tables.presets import compose_preset
from verl_clipx.papers.versions import versions_here

SEED_KEYS = ("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed")
"""The keys that recipes/common.sh sets to SEED."""

DIGITS = 6
"""Significant digits of a kept run's metrics."""

Metrics = Mapping[str, float]


def shortened(steps: int | None) -> list[str]:
    """Returns the override that a rehearsal's runs end by; None: they are as long as their setting says."""
    return [] if steps is None else [f"trainer.total_training_steps={steps}"]


def kept_path(runs: Path, preset: str, seed: int) -> Path:
    """Return the file in which a run is kept."""
    path = run_path(runs, preset, seed)
    return path.with_name(f"{path.name}{KEPT}")


def keep_run(path: Path, record: Mapping[str, Any], metrics: Mapping[int, Metrics]) -> None:
    """Write a kept run, whole or not at all.

    Args:
        path: a file whose name ends with KEPT.
    """
    steps = [
        {"step": step, "data": {key: float(f"{value:.{DIGITS}g}") for key, value in data.items()}}
        for step, data in metrics.items()
    ]
    content = "".join(json.dumps(entry) + "\n" for entry in [record, *steps])
    with replacing(path) as partial:
        partial.write_bytes(gzip.compress(content.encode(), mtime=0))


def compose_here(preset: str, seed: int, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a preset for a run in this process."""
    seeds = [f"{key}={seed}" for key in SEED_KEYS]
    return compose_preset(
        preset, ["+hardware=cpu", *seeds, *overrides, "trainer.logger=[file]", "trainer.resume_mode=disable"]
    )


def keep_configuration(folder: Path, values: Mapping[str, Any]) -> str:
    """Write the values that make up a run's setting beside the kept runs; return their hash, for the run's record."""
    hashed, path = hash_of_json(values, str), folder / CONFIGURATIONS
    known = read_configurations(folder)
    if hashed not in known:
        content = json.dumps({**known, hashed: values}, default=str, sort_keys=True)
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(content.encode(), mtime=0))
    return hashed


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
    *,
    check: Callable[[], None] | None = None,
) -> None:
    """Train, and keep the log.

    Args:
        path: the file to write; its name ends with KEPT.
        record: what the run is; its processor time is added as `seconds`.
        select: chooses which of a step's metrics to keep.
        trainer: see `trainer.train`.
        check: called when the run has ended; what it raises leaves the log unkept.
    """
    from .trainer import train

    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        train(config, log, trainer)
        metrics = read_log(log).rows
    seconds = round(time.process_time() - started, 1)
    if check is not None:
        check()
    keep_run(path, record | {"seconds": seconds}, {step: select(data) for step, data in metrics.items()})
