"""A run as what reads it sees it: its numbers, its configuration and where its traces are. Needs pandas alone."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from verl_clipx.losses.groups import OBSERVE
from verl_clipx.run.record import RunRecord, record_of
from verl_clipx.run.schedule import Schedule

if TYPE_CHECKING:
    from verl_clipx.analysis.runs.held_out import HeldOutReward
    from verl_clipx.run.trace_format import Shard

# A run's name as the recipes make it: the setting, then its seed.
_NAME = re.compile(r"(?P<setting>.+?)-seed(?P<seed>\d+)")


# Two runs are the same only if they are one object: tables have no truth value.
@dataclass(frozen=True, eq=False)
class Run:
    """A run.

    Args:
        name: of its folder or of its log.
        log: a row a step, a column a metric, from `run_log.table_of`.
        configuration: dotted key to what its record keeps of the value; empty if none was written down.
        record: what the run is; by default as far as its configuration says it.
        held_out: the rewards of its validations that have a finite score.
        traces: the folder where its traces are, if it wrote any.
        batches: step to the fingerprints of its rollout batch, as `training.worker.fingerprints` makes them; empty for
            a log that has none.
        not_finite: metric to the steps at which it was logged as NaN, infinity or null; `keys.HELD_OUT` to the steps
            whose validation has a sample with such a score.
    """

    name: str
    log: pandas.DataFrame
    configuration: Mapping[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    held_out: Sequence["HeldOutReward"] = ()
    traces: Path | None = None
    batches: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    not_finite: Mapping[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.record is None:
            object.__setattr__(self, "record", record_of(self.configuration))
        object.__setattr__(self, "configuration", self.record.configuration)

    @property
    def versions(self) -> Mapping[str, str | None]:
        """Distribution to version; empty if none were written down."""
        return self.record.versions

    @cached_property
    def shards(self) -> list["Shard"]:
        """The files of its traces."""
        # Imports pyarrow.
        from verl_clipx.run.trace_format import shards_in

        return [] if self.traces is None else shards_in(self.traces)

    def shards_at(self, step: int, update: int | None = None) -> list["Shard"]:
        """Returns the files of its traces of a step, or of one update of it."""
        return [shard for shard in self.shards if shard.step == step and update in (None, shard.update)]

    @property
    def seed(self) -> int | None:
        """The seed of the training; None if nothing says it."""
        if self.record.seeds.data is not None:
            return self.record.seeds.data
        named = _NAME.fullmatch(self.name)
        return int(named["seed"]) if named else None

    @property
    def method(self) -> str:
        """The loss: a method of the plugin's, verl's loss_mode, or, if nothing says it, the run's name."""
        named = _NAME.fullmatch(self.name)
        loss = self.record.loss
        method = loss.mode if loss.method in (None, OBSERVE) else loss.method
        return str(method or (named["setting"] if named else self.name)).removeprefix("clipx_")

    @property
    def loss(self) -> str:
        """The method as the page calls it: a loss of the user's own by the name that its author gave it."""
        own = self.record.loss.function
        if own or self.method == self.name:
            return str(own).rpartition(":")[2] if own else self.name
        return self.method.upper().replace("_", " ")

    @cached_property
    def significant(self) -> dict[str, str]:
        """All that its setting consists of, see `sameness.setting_of_run`: dotted key to value in JSON."""
        from verl_clipx.analysis.runs.sameness import setting_of_run

        values = setting_of_run(self.configuration)
        return {key: json.dumps(value, default=str) for key, value in sorted(values.items())}

    def values(self, key: str) -> pandas.Series:
        """Returns a metric by step, without steps that lack it or at which it is not finite."""
        values = self.log[key] if key in self.log else pandas.Series(dtype=float)
        return values[numpy.isfinite(values)]

    @property
    def fate_of_skipped(self) -> str:
        """Says what verl 0.9.1 did with an update whose gradient is not finite, by the run's engine."""
        fates = {None: "skipped or taken, depending on the engine,", "megatron": "taken"}
        return fates.get(self.record.training.name, "skipped")

    @property
    def schedule(self) -> Schedule:
        """Returns what the updates on a rollout batch consist of, as far as its configuration says it."""
        return self.record.schedule
