"""The runs that a report compares: their logs, configurations and traces, grouped by setting."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_clipx.common.files import read_config, read_json_object
from verl_clipx.common.run_files import METRICS, VALIDATION, record_path, traces_path
from verl_clipx.common.secrets import redacted
from verl_clipx.common.traces import Shard, shards_in
from verl_clipx.runs import keys
from verl_clipx.runs.held_out import HeldOutReward, held_out_rewards
from verl_clipx.runs.other_logs import reader_of
from verl_clipx.runs.run_log import (
    SkippedUpdates,
    not_finite_in,
    read_rows,
    skipped_updates,
    table_of,
    with_entropy,
)

GRPO_METHOD = "grpo"

# A run's name as the recipes make it: the setting, then its seed.
_NAME = re.compile(r"(?P<setting>.+?)-seed(?P<seed>\d+)")

# What may differ between runs of one setting: seeds, names, places, and copies of what stands elsewhere.
_SEEDS = re.compile(r"(^|[._])seed$")
_NOT_OF_THE_SETTING = re.compile(
    r"^(hydra|ray_kwargs|clipx\.(trace|log|health\w*)|trainer\.(logger|resume_\w+|\w+_dir|(max_)?\w+_to_keep))\b"
    r"|\.(experiment|project)_name$|policy_loss\.(clipx|run)\b|_target_$"
)


# Two runs are the same only if they are one object: tables have no truth value.
@dataclass(frozen=True, eq=False)
class Run:
    """A run.

    Args:
        name: that of its folder or of its log.
        configuration: dotted key to value; empty if none was written down.
        versions: distribution to version; empty if none were written down.
        held_out: the rewards of its validations that have a finite score.
        traces: the folder where its traces are, if it wrote any.
        not_finite: metric to the steps at which it was logged as NaN, infinity or null; `keys.HELD_OUT` to the steps
            whose validation has a sample with such a score.
        record: what else the run wrote down: when it `started`, and on which kinds of `accelerators`.
    """

    name: str
    log: pandas.DataFrame
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]
    held_out: list[HeldOutReward]
    traces: Path
    not_finite: Mapping[str, list[int]] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def shards(self) -> list[Shard]:
        """The files of its traces."""
        return shards_in(self.traces)

    @property
    def seed(self) -> int | None:
        """The seed of the training; None if nothing says it."""
        found = self.configuration.get("data.seed")
        named = _NAME.fullmatch(self.name)
        return found if found is not None else int(named["seed"]) if named else None

    @property
    def method(self) -> str:
        """The loss: a method of the plugin's, verl's loss_mode, or, if nothing says it, the run's name."""
        named = _NAME.fullmatch(self.name)
        of_verl = self.configuration.get("actor_rollout_ref.actor.policy_loss.loss_mode")
        ours = self.configuration.get("clipx.method")
        method = of_verl if ours in (None, "observe") else ours
        return str(method or (named["setting"] if named else self.name)).removeprefix("clipx_")

    @property
    def loss(self) -> str:
        """The method as the page calls it: a loss of the user's own by the name that its author gave it."""
        own = self.configuration.get("clipx.function")
        if own or self.method == self.name:
            return str(own).rpartition(":")[2] if own else self.name
        return self.method.upper().replace("_", " ")

    @cached_property
    def significant(self) -> dict[str, str]:
        """What makes up its setting: dotted key to value in JSON, without seeds, names and places."""
        return {
            key: json.dumps(value, default=str)
            for key, value in sorted(self.configuration.items())
            if not (_NOT_OF_THE_SETTING.search(key) or _SEEDS.search(key))
        }

    def values(self, key: str) -> pandas.Series:
        """A metric by step, without steps that lack it or at which it is not finite."""
        found = self.log[key] if key in self.log else pandas.Series(dtype=float)
        return found[numpy.isfinite(found)]

    @property
    def skipped_updates(self) -> SkippedUpdates | None:
        """The optimizer updates that verl skipped, None if it took them all."""
        return skipped_updates(self.log, self.not_finite)

    @property
    def updates_a_step(self) -> int | None:
        """Optimizer updates of a training step; None where the configuration does not say it."""
        actor = "actor_rollout_ref.actor"
        named = ("data.train_batch_size", f"{actor}.ppo_mini_batch_size", f"{actor}.ppo_epochs")
        prompts, mini_batch, epochs = found = [self.configuration.get(key) for key in named]
        if not all(isinstance(value, int) and value > 0 for value in found):
            return None
        passes = 2 if self.configuration.get("clipx.update.eta") is not None else 1
        return ceil(prompts / mini_batch) * epochs * passes


@dataclass(frozen=True)
class Setting:
    """The runs that differ only in seeds, names and places.

    Args:
        label: what the page calls it: the method and, where methods repeat, what else sets it apart.
        runs: at least one.
    """

    label: str
    runs: list[Run] = field(default_factory=list)

    def table(self, key: str) -> pandas.DataFrame:
        """A metric: a row a step that all its runs have, a column a run; without columns where no run logs it."""
        found = [run.values(key) for run in self.runs]
        return pandas.concat(found, axis=1, join="inner", keys=range(len(found))) if all(map(len, found)) else _NONE

    def bins(self, name: str) -> list[str]:
        """The keys of a metric of probability bins; none unless all its runs log a finite value of each."""
        found = keys.of_bins(name, {column for run in self.runs for column in run.log})
        return found if all(len(self.mean(key)) for key in found) else []

    @property
    def seeds(self) -> int:
        """How many independent runs it has: runs of one seed count as one, and each run of unknown seed counts."""
        return len(self.runs_by_seed)

    def by_seed(self, table: pandas.DataFrame) -> pandas.DataFrame:
        """A table with a column for each independent run: the mean over the runs of a seed.

        Args:
            table: a column a run, in their order.
        """
        return pandas.DataFrame({seed: table.iloc[:, runs].mean(axis=1) for seed, runs in self.runs_by_seed.items()})

    @property
    def runs_by_seed(self) -> dict[int | str, list[int]]:
        """The indices of its runs by seed; one of unknown seed is by itself, under a name that no other setting has."""
        found: dict[int | str, list[int]] = {}
        for index, run in enumerate(self.runs):
            found.setdefault(f"{self.label}, run {index}" if run.seed is None else run.seed, []).append(index)
        return found

    def mean(self, key: str) -> pandas.Series:
        """A metric by step, its mean over runs; empty where no run logs it."""
        return self.table(key).mean(axis=1)

    def parameter(self, name: str, otherwise: Any = None) -> Any:
        """A parameter of its method, from its configuration."""
        return self.runs[0].configuration.get(f"clipx.{name}", otherwise)


_NONE = pandas.DataFrame(dtype=float)


def log_of(path: Path) -> Path:
    """The log of a run that is named by its folder or by that log; the folder of another logger is itself a log."""
    metrics = path / METRICS
    return metrics if path.is_dir() and (metrics.exists() or reader_of(path) is None) else path


def read_run(path: Path) -> Run:
    """Reads what a run left.

    Args:
        path: its folder, the file of its log, or a log that `other_logs.reader_of` knows.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the log is empty, damaged, or not that of a policy's training; or a file beside it cannot be read.
    """
    log_path = log_of(path)
    reader = reader_of(log_path)
    rows, record = read_rows(log_path) if reader is None else (reader(log_path), {})
    log, not_finite = with_entropy(table_of(rows)), not_finite_in(rows)
    if not any(name.startswith("actor/") for name in log):
        raise ValueError(f"{log_path}: no metric begins with actor/: not the log of a policy's training by verl.")
    folder = path if path.is_dir() else log_path.parent
    validations = held_out_rewards(folder / VALIDATION) if path.is_dir() else []
    if steps := [reward.step for reward in validations if reward.not_finite]:
        not_finite[keys.HELD_OUT] = steps
    name = path.resolve().name if path.is_dir() or path.name != METRICS else path.resolve().parent.name
    record = record or _record(log_path)
    # An older record, or Hydra's own, has credentials as they were given.
    configuration = flat(redacted(record.get("configuration") or _of_hydra(folder)))
    return Run(
        Path(name.removesuffix(".gz")).stem if name == path.name and path.is_file() else name,
        log,
        configuration,
        record.get("versions", {}),
        [reward for reward in validations if reward.problems],
        traces_path(log_path),
        not_finite,
        record,
    )


def _record(log: Path) -> dict[str, Any]:
    """What `trainer.log.write_record` wrote, or, for a run without that, what `clipx table plan` did."""
    for path in (record_path(log), log.with_name("run.json")):
        if path.exists():
            return read_json_object(path, {"versions": {str: str | None}})
    return {}


def _of_hydra(folder: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = folder / ".hydra" / "config.yaml"
    return OmegaConf.to_container(read_config(path), resolve=False) if path.exists() else {}


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration's leaves by dotted key; a list is a leaf."""
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def differences(runs: list[Run]) -> dict[str, list[str | None]]:
    """What sets runs apart: dotted key to each run's value as JSON, None where a run lacks the key.

    Args:
        runs: one without a configuration decides nothing, and has None for each key.
    """
    known = [run.significant for run in runs if run.configuration]
    keys = sorted({key for found in known for key in found})
    return {
        key: [run.significant.get(key) for run in runs] for key in keys if len({found.get(key) for found in known}) > 1
    }


def settings_of(runs: list[Run]) -> list[Setting]:
    """Groups runs by setting, in the order in which each setting was first named.

    Args:
        runs: at least one. One without a configuration or its hash is a setting of its own: nothing says what it
            trained.
    """
    groups: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        # The configuration of a kept run is only a part of it, without the method.
        known = json.dumps([run.method, run.significant]) if run.configuration else run.record.get("config_hash")
        key = known or f"run {index}"
        groups.setdefault(key, []).append(run)
    firsts = [members[0] for members in groups.values()]
    return [Setting(*parts) for parts in zip(_labels(firsts), groups.values(), strict=True)]


def baseline_of(settings: list[Setting], name: str | None = None) -> Setting:
    """The setting that the others are compared with.

    Args:
        settings: at least one.
        name: of a run or a method, or a setting's label; None: GRPO if there is one, else the first setting.

    Raises:
        ValueError: nothing or more than one setting has that name; says which names there are.
    """
    if name is None:
        return next((one for one in settings if one.runs[0].method == GRPO_METHOD), settings[0])
    of_run = [one for one in settings if any(run.name == name for run in one.runs)]
    method = name.lower().replace(" ", "_")
    found = of_run or [one for one in settings if name == one.label or one.runs[0].method.lower() == method]
    if len(found) == 1:
        return found[0]
    runs = ", ".join(run.name for one in settings for run in one.runs)
    if found:
        raise ValueError(f"--baseline {name}: {len(found)} settings have that name. Name a run of one of them: {runs}.")
    methods = ", ".join(dict.fromkeys(one.runs[0].method for one in settings))
    raise ValueError(f"--baseline {name}: no such run or method. The runs: {runs}. The methods: {methods}.")


def _labels(runs: list[Run]) -> list[str]:
    """The method of each; where methods repeat, with a value that sets it apart, or the run's name, or a number."""
    methods = [run.loss for run in runs]
    labels = []
    for index, (run, method) in enumerate(zip(runs, methods, strict=True)):
        rivals = [other for other, same in zip(runs, methods, strict=True) if same == method]
        if len(rivals) > 1 and not run.configuration and [other.name for other in runs].count(run.name) == 1:
            labels.append(run.name)
            continue
        apart = {} if len(rivals) == 1 else differences(rivals)
        keys = sorted(apart, key=lambda key: (not key.startswith("clipx."), key))[:2]
        values = [f"{key.rpartition('.')[2]} {run.significant.get(key, 'unset')}" for key in keys]
        labels.append(", ".join([method, *values]) if values else method if len(rivals) == 1 else f"{method} {index}")
    return labels
