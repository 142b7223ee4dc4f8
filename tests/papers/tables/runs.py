"""Runs of two made-up presets as they are on disk: a configuration, what verl's file logger writes, evaluations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.analysis.runs.sameness import significant_values
from verl_clipx.papers.tables.collect import collect
from verl_clipx.papers.tables.definition import Table

GRPO = "made/grpo"
ACPO = "made/acpo"
VERSIONS = {"verl": "0.9.1", "torch": "2.13.0", "vllm": None}


def make_config(preset: str, **changes: Any) -> DictConfig:
    """Return a preset's configuration with some keys changed."""
    config = OmegaConf.create(
        {
            "data": {"seed": 1, "train_files": "${oc.env:CLIPX_DATA,data}/x", "val_files": "v", "train_batch_size": 32},
            "trainer": {"total_training_steps": 20, "nnodes": 1},
            "actor_rollout_ref": {"model": {"path": "${oc.env:CLIPX_DATA,data}/m"}, "actor": {"optim": {"lr": 3e-4}}},
            "algorithm": {"preset": preset},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config


def collect_results(table: Table, runs: Path, rows: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of `clipx papers table collect`; rows: their names, empty for all."""

    def values_of_preset(preset: str) -> dict[str, Any]:
        return significant_values(make_config(preset))

    return collect(table, runs, values_of_preset, rows)


def find_cell(results: dict[str, Any], row: str, column: str) -> dict[str, Any]:
    """Return the cell of a row and a column."""
    (cell,) = [cell for cell in results["cells"] if (cell["row"], cell["column"]) == (row, column)]
    return cell


def write_run(runs: Path, preset: str, seed: int, metrics: Mapping[int, Any] | None = None, config=None, **changes):
    """Write a finished run, and return its folder.

    Args:
        metrics: by step; the last one's checkpoint is there.
        config: in place of the preset's.
        changes: to the configuration.
    """
    folder = runs / f"{preset}-seed{seed}"
    if config is None:
        config = make_config(preset, **{"data.seed": seed, "trainer.nnodes": 2, **changes})
    if metrics is None:
        metrics = {step: {"timing_s/step": float(step)} for step in range(1, 21)}
    for name in (".hydra", "checkpoints"):
        (folder / name).mkdir(parents=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(max(metrics)))
    write_metrics(folder, metrics)
    return folder


def write_metrics(folder: Path, steps: Mapping[int, Any]) -> None:
    """Write what verl's file logger writes."""
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_results(
    folder: Path, benchmark: str, values: list[float], model: str = "m", step: int | None = 20, questions=4, **changes
) -> None:
    """Write the results of an evaluation: avg@8 of these values, a question each.

    Args:
        changes: to its sampling settings, or `cluster`.
    """
    out = folder / "evaluation" / benchmark
    out.mkdir(parents=True, exist_ok=True)
    cluster = changes.pop("cluster", None)
    sampling = {"samples": 8, "seeds": [0], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, **changes}
    config = {
        "model": model,
        "protocol": "sampled",
        "reward": "r",
        "versions": VERSIONS,
        "cluster": cluster,
        "checkpoints": {"last": {"source": model, "step": step, "fingerprint": ""}},
        "sampling": sampling,
        "benchmarks": {benchmark: {"path": "b", "sha256": "", "questions": questions}},
    }
    mean = sum(values) / len(values)
    metric = f"avg@{sampling['samples']}"
    benchmark_results = {
        "result": {metric: {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}},
        "values": {metric: values},
    }
    (out / "results.json").write_text(json.dumps({"config": config, "benchmarks": {benchmark: benchmark_results}}))
