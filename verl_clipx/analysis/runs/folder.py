"""The files of a run: its log, record, configuration, validations and traces, each read when it is asked for."""

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
from omegaconf import DictConfig, OmegaConf

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.batches import check_fingerprints
from verl_clipx.analysis.runs.held_out import read_held_out_rewards
from verl_clipx.analysis.runs.other_logs import is_of_wandb, read_wandb, reader_of
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.run_log import (
    VERL_ONLY,
    Log,
    Rows,
    not_finite_in,
    read_log,
    table_of,
    with_entropy,
)
from verl_clipx.analysis.runs.sameness import resolve_value, significant_values
from verl_clipx.common.files import read_config, read_json_object, read_whole_number
from verl_clipx.run.kept_values import kept_configuration
from verl_clipx.run.keys import OF_THE_PLUGIN, flat
from verl_clipx.run.record import RunRecord, read_record
from verl_clipx.run.run_files import LATEST, METRICS, VALIDATION, record_path, traces_path

KEPT = ".jsonl.gz"
"""Ending of the name of a kept run: one file, its record in the first line, then its steps."""

# The square of a greater number, summed over a log's steps, would be infinite.
LARGEST = 1e150
# Hydra's own record of the configuration, in a run's folder.
COMPOSED = ".hydra/config.yaml"


@dataclass(frozen=True)
class RunFolder:
    """The files of a run: its folder, a log, a kept run, a log that `other_logs.reader_of` knows, or a run of W&B."""

    path: Path

    @cached_property
    def log(self) -> Path:
        """The log's file; or the folder of another logger, which has no file of verl's."""
        if not self.path.is_dir():
            return self.path
        metrics = self.path / METRICS
        if metrics.exists() or reader_of(self.path) is None:
            return metrics
        return self.path

    @cached_property
    def _read(self) -> Log:
        """What the log says."""
        if is_of_wandb(self.path):
            return read_wandb(self.path)
        read = reader_of(self.log) or read_log
        return read(self.log)

    @property
    def rows(self) -> Rows:
        """The numbers of its log by step; see `run_log.read_log`."""
        return self._read.rows

    @property
    def batches(self) -> Mapping[int, Mapping[str, Any]]:
        """The fingerprints of its rollout batches by step; none in a log that is not the plugin's.

        Raises:
            ValueError: they are damaged.
        """
        check_fingerprints(self.log, self._read.batches)
        return self._read.batches

    @property
    def metrics(self) -> Rows:
        """As `rows`; empty for a run that has not logged a step."""
        return self.rows if self._is_logged else {}

    @property
    def _is_logged(self) -> bool:
        """Whether there is a log with something in it; W&B and the folder of another logger have one."""
        if is_of_wandb(self.path) or self.log.is_dir():
            return True
        return self.log.is_file() and self.log.stat().st_size > 0

    @cached_property
    def record_content(self) -> Mapping[str, Any]:
        """What the run wrote of itself, as it stands in its record, or else in its log; empty if it wrote nothing.

        A record has among others its start, accelerators, versions, commit and configuration. Of a log it is the first
        line of a kept run, or the configuration that a console or W&B shows.

        Raises:
            ValueError: the record's file is damaged.
        """
        path = record_path(self.log)
        if path.exists():
            return read_json_object(path, {"versions": {str: str | None}}, "remove it to read the log without it")
        return self._read.header if self._is_logged else {}

    @cached_property
    def run_record(self) -> RunRecord:
        """What the run is, by its record or, without one, by the configuration that Hydra composed.

        Raises:
            ValueError: the record is of a newer form, or damaged.
        """
        configuration = self.record_content.get("configuration") or {}
        folder = self.path if self.path.is_dir() else self.log.parent
        composed = folder / COMPOSED
        if not configuration and composed.exists():
            configuration = resolve_where_possible(read_config(composed))
        source = record_path(self.log)
        if not isinstance(configuration, dict):
            raise ValueError(f"{source}: its configuration is not an object; remove it to read the log without it")
        return read_record({**self.record_content, "configuration": flat(configuration)}, str(source))

    @property
    def is_trained(self) -> bool:
        """Returns whether a training was started in the folder."""
        return (self.path / COMPOSED).exists()

    @cached_property
    def config(self) -> DictConfig:
        """The configuration as Hydra composed it, not resolved."""
        if not self.is_trained:
            raise FileNotFoundError(
                f"{self.path / COMPOSED}: does not exist. Start the run with hydra.run.dir={self.path}"
            )
        return read_config(self.path / COMPOSED)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values that define the run; see `sameness.significant_values`."""
        return kept_configuration(significant_values(self.config))

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 if there is none."""
        return max(self.metrics, default=0)

    @property
    def last_checkpoint(self) -> int | None:
        """The step of the last complete checkpoint; None if there is none."""
        tracker = self.path / "checkpoints" / LATEST
        return read_whole_number(tracker) if tracker.exists() else None


def resolve_where_possible(config: DictConfig) -> dict[str, Any]:
    """Return the values of a composed configuration by dotted key, without what the plugin itself wrote into it.

    A value that does not resolve here, such as an environment variable without a default, is as in `resolve_value`.
    """
    written_values = flat(OmegaConf.to_container(config))
    resolved: dict[str, Any] = {}
    for key, written_value in written_values.items():
        if not key.startswith(OF_THE_PLUGIN):
            resolved[key] = resolve_value(config, key, written_value)
    return resolved


def read_run(path: Path) -> Run:
    """Read what a run left, from a path as for `RunFolder`.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the log is empty, damaged, or not that of a policy's training; or a file beside it can't be read.
    """
    files = RunFolder(path)
    log = with_entropy(table_of(files.rows))
    not_finite = not_finite_in(files.rows)
    if not any(name.startswith(keys.OF_VERL) for name in log):
        prefixes = ", ".join(keys.OF_VERL)
        raise ValueError(
            f"{files.log}: no metric begins with {prefixes}: not the log of a policy's training by verl. {VERL_ONLY}"
        )
    is_too_large = (log.abs() > LARGEST) & numpy.isfinite(log)
    if is_too_large.any(axis=None):
        metrics = ", ".join(is_too_large.columns[is_too_large.any()])
        warnings.warn(
            f"{files.log}: left out, since nothing can be computed with such numbers: {metrics}.", stacklevel=2
        )
        log = log.mask(is_too_large)
    folder = path if path.is_dir() else files.log.parent
    validations = read_held_out_rewards(folder / VALIDATION) if path.is_dir() else []
    steps_not_finite = [reward.step for reward in validations if reward.not_finite]
    if steps_not_finite:
        not_finite[keys.HELD_OUT] = steps_not_finite
    return Run(
        name=files.record_content.get("display_name") or _name_of(path),
        log=log,
        configuration=files.run_record.configuration,
        record=files.run_record,
        held_out=[reward for reward in validations if reward.by_problem],
        traces=traces_path(files.log),
        batches=files.batches,
        not_finite=not_finite,
    )


def _name_of(path: Path) -> str:
    """Return the name of a run whose record has none: the name of its folder, or that of its log without its endings.

    A log under the name that verl's logger gives it has the name of its folder.
    """
    if path.is_dir():
        name = path.resolve().name
    elif path.name == METRICS:
        name = path.resolve().parent.name
    else:
        name = Path(path.name.removesuffix(".gz")).stem
    # A file's name may have bytes that aren't UTF-8. A page is UTF-8, so they are replaced.
    return os.fsencode(name).decode(errors="replace")


def run_path(runs: Path, source: str, seed: int) -> Path:
    """Return the folder into which the recipes put a run.

    Args:
        runs: the folder of all runs.
        source: the run's preset.
        seed: the run's seed.
    """
    return runs / f"{source}-seed{seed}"


def find_runs(runs: Path, source: str) -> list[Path]:
    """Return a preset's runs, both folders and kept ones, in the order of their seeds."""
    name_of_run = re.compile(rf"{re.escape(Path(source).name)}-seed(?P<seed>\d+)({re.escape(KEPT)})?")
    seeds: dict[Path, int] = {}
    for path in (runs / source).parent.glob("*"):
        match = name_of_run.fullmatch(path.name)
        if match:
            seeds[path] = int(match["seed"])
    return sorted(seeds, key=seeds.get)
