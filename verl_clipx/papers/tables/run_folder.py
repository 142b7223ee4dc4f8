"""Reads what a training run has left behind: configuration, metrics and evaluations, or a kept run's log."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas
from omegaconf import DictConfig

from verl_clipx.common.files import (
    parse_json,
    read_bytes,
    read_config,
    read_json_object,
    read_table,
    read_whole_number,
    replacing,
)
from verl_clipx.common.secrets import redacted
from verl_clipx.papers.tables.config_hash import significant_values

# The parts of an evaluation's results that a table needs.
RESULTS = {
    "config": {
        "model": str,
        "protocol": str,
        "checkpoints": {str: {"step": int | None}},
        "benchmarks": {str: dict},
        "sampling": {"samples": int, "temperature": int | float, "max_tokens": int, "top_p": int | float},
        "versions": dict,
    },
    "benchmarks": {
        str: {"result": {str: {"mean": int | float, "low": int | float | None, "high": int | float | None}}}
    },
}


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, which are the same for every recipe."""

    path: Path

    @property
    def is_trained(self) -> bool:
        """Whether a training was started in the folder."""
        return (self.path / ".hydra" / "config.yaml").exists()

    @cached_property
    def config(self) -> DictConfig:
        """The configuration as Hydra composed it, unresolved."""
        path = self.path / ".hydra" / "config.yaml"
        if not path.exists():
            raise FileNotFoundError(f"{path}: does not exist. Start the run with hydra.run.dir={self.path}")
        return read_config(path)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values that define the run; see `significant_values`."""
        return redacted(significant_values(self.config))

    @cached_property
    def metrics(self) -> dict[int, dict[str, float]]:
        """What verl's file logger wrote, by step; empty if it wrote nothing. See `metrics_of`."""
        path = self.path / "metrics.jsonl"
        return metrics_of(read_bytes(path).splitlines() if path.exists() else [])

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 if there is none."""
        return max(self.metrics, default=0)

    @property
    def last_checkpoint(self) -> int | None:
        """The step of the last complete checkpoint; None if there is none."""
        tracker = self.path / "checkpoints" / "latest_checkpointed_iteration.txt"
        return read_whole_number(tracker) if tracker.exists() else None

    @property
    def total_steps(self) -> int | None:
        """The number of steps that was requested; None if it follows from the data."""
        return self.config.trainer.total_training_steps

    @property
    def seed(self) -> int | None:
        """The seed of the training; None if the configuration has none."""
        return self.config.data.get("seed")

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `clipx table plan --run` recorded: commit, versions, seconds. Empty for other runs."""
        path = self.path / "run.json"
        return read_json_object(path) if path.exists() else {}

    def evaluation(self, benchmark: str) -> dict[str, Any] | None:
        """Return the results of `clipx eval run` on a benchmark; None if there are none."""
        path = self.path / "evaluation" / benchmark / "results.json"
        return read_json_object(path, RESULTS) if path.exists() else None

    def scores(self, benchmark: str) -> pandas.DataFrame:
        """Return the parts of the reward for each response of an evaluation, over all checkpoints.

        Raises:
            ValueError: there are no scores, or they cannot be read.
        """
        folder = self.path / "evaluation" / benchmark
        paths = sorted(folder.glob(f"*/{benchmark}/scores.parquet"))
        if not paths:
            raise ValueError(f"{folder}: contains no scores.parquet; score it with `clipx eval score {folder}`")
        return pandas.concat([read_table(path).to_pandas() for path in paths], ignore_index=True)


KEPT = ".jsonl.gz"
"""Ending of a kept run's file name."""

DIGITS = 6
"""Significant digits of a kept run's metrics."""


@dataclass(frozen=True)
class KeptRun:
    """A finished run in one compressed file: what it was, and the metrics of each step that tables need."""

    path: Path

    @cached_property
    def lines(self) -> list[bytes]:
        """The record, and then a line for each step."""
        try:
            lines = gzip.decompress(read_bytes(self.path)).splitlines()
        except (OSError, EOFError) as error:
            raise ValueError(f"{self.path}: no kept run: {error}; remove it, and `clipx table fill` makes it") from None
        if not lines:
            raise ValueError(f"{self.path}: no kept run: it is empty; remove it, and `clipx table fill` makes it")
        return lines

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the run was: seed, config_hash, steps, started_from, policy, trained_on, commit, versions, seconds."""
        return parse_json(self.lines[0], str(self.path))

    @cached_property
    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics that were kept, by step."""
        return metrics_of(self.lines[1:])


def keep_run(path: Path, record: Mapping[str, Any], metrics: Mapping[int, Mapping[str, float]]) -> None:
    """Write a kept run atomically.

    Args:
        path: a file whose name ends with `KEPT`.
    """
    steps = [
        {"step": step, "data": {key: float(f"{value:.{DIGITS}g}") for key, value in data.items()}}
        for step, data in metrics.items()
    ]
    content = "".join(json.dumps(entry) + "\n" for entry in [record, *steps])
    with replacing(path) as partial:
        partial.write_bytes(gzip.compress(content.encode(), mtime=0))


def metrics_of(lines: Iterable[bytes]) -> dict[int, dict[str, float]]:
    """Return what verl's file logger wrote, by step. Lines that a killed process left incomplete are skipped."""
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            entry = parse_json(line, "")
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    return dict(sorted(steps.items()))


def run_path(runs: Path, source: str, seed: int) -> Path:
    """Return the folder in which the recipes put a run.

    Args:
        source: the preset, or the result of `Table.folder_of`.
    """
    return runs / f"{source}-seed{seed}"


def kept_path(runs: Path, preset: str, seed: int) -> Path:
    """Return the file in which `clipx table fill` keeps a run."""
    return runs / f"{preset}-seed{seed}{KEPT}"


def find_runs(runs: Path, source: str) -> list[Path]:
    """Return a preset's runs, both folders and kept ones, in the order of their seeds."""
    folder, name = (runs / source).parent, (runs / source).name
    seeds = {path: path.name.removeprefix(f"{name}-seed").removesuffix(KEPT) for path in folder.glob(f"{name}-seed*")}
    return sorted((path for path, seed in seeds.items() if seed.isdecimal()), key=lambda path: int(seeds[path]))
