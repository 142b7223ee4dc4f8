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
from verl_clipx.analysis.runs.batches import check_batches
from verl_clipx.analysis.runs.held_out import held_out_rewards
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
from verl_clipx.analysis.runs.sameness import significant_values, value_of
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
        """The file of its log; the folder of another logger is itself a log."""
        metrics = self.path / METRICS
        return metrics if self.path.is_dir() and (metrics.exists() or reader_of(self.path) is None) else self.path

    @cached_property
    def _read(self) -> Log:
        if is_of_wandb(self.path):
            return read_wandb(self.path)
        return (reader_of(self.log) or read_log)(self.log)

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
        check_batches(self.log, self._read.batches)
        return self._read.batches

    @property
    def metrics(self) -> Rows:
        """As `rows`; empty for a run that has not logged a step."""
        return self.rows if self._is_logged else {}

    @property
    def _is_logged(self) -> bool:
        return is_of_wandb(self.path) or (self.log.is_file() and self.log.stat().st_size > 0)

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """Reads what it wrote of itself: start, accelerators, versions, commit, configuration; empty if nothing."""
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
        content = self.record
        configuration = content.get("configuration") or {}
        composed = (self.path if self.path.is_dir() else self.log.parent) / COMPOSED
        if not configuration and composed.exists():
            configuration = resolved(read_config(composed))
        where = record_path(self.log)
        if not isinstance(configuration, dict):
            raise ValueError(f"{where}: its configuration is not an object; remove it to read the log without it")
        return read_record({**content, "configuration": flat(configuration)}, str(where))

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


def resolved(config: DictConfig) -> dict[str, Any]:
    """Returns a composed configuration's values by dotted key, as written where they don't resolve here."""
    written = flat(OmegaConf.to_container(config))
    return {key: value_of(config, key, text) for key, text in written.items() if not key.startswith(OF_THE_PLUGIN)}


def read_run(path: Path) -> Run:
    """Reads what a run left, from a path as for `RunFolder`.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the log is empty, damaged, or not that of a policy's training; or a file beside it can't be read.
    """
    files = RunFolder(path)
    log = with_entropy(table_of(files.rows))
    not_finite = not_finite_in(files.rows)
    if not any(name.startswith(keys.OF_VERL) for name in log):
        begins = ", ".join(keys.OF_VERL)
        raise ValueError(
            f"{files.log}: no metric begins with {begins}: not the log of a policy's training by verl. {VERL_ONLY}"
        )
    beyond = (log.abs() > LARGEST) & numpy.isfinite(log)
    if beyond.any(axis=None):
        which = ", ".join(beyond.columns[beyond.any()])
        warnings.warn(f"{files.log}: left out, since nothing can be computed with such numbers: {which}.", stacklevel=2)
        log = log.mask(beyond)
    folder = path if path.is_dir() else files.log.parent
    validations = held_out_rewards(folder / VALIDATION) if path.is_dir() else []
    if steps := [reward.step for reward in validations if reward.not_finite]:
        not_finite[keys.HELD_OUT] = steps
    record = files.run_record
    return Run(
        files.record.get("display_name") or _name_of(path),
        log,
        record.configuration,
        record,
        held_out=[reward for reward in validations if reward.by_problem],
        traces=traces_path(files.log),
        batches=files.batches,
        not_finite=not_finite,
    )


def _name_of(path: Path) -> str:
    whole = path.resolve()
    if not path.is_dir():
        whole = whole.parent if path.name == METRICS else Path(path.name.removesuffix(".gz")).with_suffix("")
    # A page is UTF-8, while a file's name may have any bytes.
    return os.fsencode(whole.name).decode(errors="replace")


def run_path(runs: Path, source: str, seed: int) -> Path:
    """Returns the folder in which the recipes put a run; `source` is the preset, or the result of `Table.folder_of`."""
    return runs / f"{source}-seed{seed}"


def find_runs(runs: Path, source: str) -> list[Path]:
    """Returns a preset's runs, both folders and kept ones, in the order of their seeds."""
    named = re.compile(rf"{re.escape(Path(source).name)}-seed(\d+)({re.escape(KEPT)})?")
    folder = (runs / source).parent
    seeds = {path: int(name[1]) for path in folder.glob("*") if (name := named.fullmatch(path.name))}
    return sorted(seeds, key=seeds.get)
