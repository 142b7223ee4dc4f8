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

# A run's name as the recipes write it: the setting, then its seed.
_NAME = re.compile(r"(?P<setting>.+?)-seed(?P<seed>\d+)")


# Two runs are the same only if they are one object: tables have no truth value.
@dataclass(frozen=True, eq=False)
class Run:
    """A run.

    Args:
        name: of its folder or of its log.
        log: a row a step, a column a metric, from `run_log.table_of`.
        configuration: from a dotted key to what the record keeps of its value; empty if none was written down.
        record: what the run is. By default it is made from the configuration; it then replaces the configuration by
            the part that a record keeps.
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
        """From the name of an installed package to its version; empty if none were written down."""
        return self.record.versions

    @cached_property
    def shards(self) -> list["Shard"]:
        """The files of its traces: each has the tokens of an update that one rank traced. Empty without traces."""
        # This import takes long: it imports pyarrow.
        from verl_clipx.run.trace_format import shards_in

        if self.traces is None:
            return []
        return shards_in(self.traces)

    def shards_at(self, step: int, update: int | None = None) -> list["Shard"]:
        """Returns the files of a step's traces.

        Args:
            step: the training step.
            update: an update on its rollout batch; None for all of them.
        """
        of_step = [shard for shard in self.shards if shard.step == step]
        if update is None:
            return of_step
        return [shard for shard in of_step if shard.update == update]

    @property
    def seed(self) -> int | None:
        """The seed of the training; None if nothing says it."""
        if self.record.seeds.data is not None:
            return self.record.seeds.data
        named = _NAME.fullmatch(self.name)
        return int(named["seed"]) if named else None

    @property
    def method(self) -> str:
        """The name of the loss that it trained with, without `clipx_`.

        It is a method of the plugin's or, where the plugin only observes or is not used, verl's loss_mode. If neither
        is written down, it is the run's name without its seed.
        """
        loss = self.record.loss
        is_verls = loss.method in (None, OBSERVE)
        method = loss.mode if is_verls else loss.method
        if not method:
            named = _NAME.fullmatch(self.name)
            method = named["setting"] if named else self.name
        return str(method).removeprefix("clipx_")

    @property
    def loss(self) -> str:
        """The method as the page calls it: `ACPO`, or of a user's own loss the name that its author gave it."""
        own = self.record.loss.function
        if own:
            # It is written as package.module:name.
            return str(own).rpartition(":")[2]
        if self.method == self.name:
            return self.name
        return self.method.upper().replace("_", " ")

    @cached_property
    def significant(self) -> dict[str, str]:
        """What makes up its setting, from a dotted key to the value in JSON; see `sameness.setting_of_run`."""
        from verl_clipx.analysis.runs.sameness import setting_of_run

        values = setting_of_run(self.configuration)
        return {key: json.dumps(value, default=str) for key, value in sorted(values.items())}

    def values(self, key: str) -> pandas.Series:
        """Returns a metric's finite values by step; empty if the run did not log it."""
        if key not in self.log:
            return pandas.Series(dtype=float)
        values = self.log[key]
        return values[numpy.isfinite(values)]

    @property
    def fate_of_not_finite_updates(self) -> str:
        """What verl 0.9.1 did with updates whose gradient is not finite: `skipped`, or `taken`, by the run's engine.

        Of a run that does not say its engine it is a part of a sentence with both.
        """
        engine = self.record.training.name
        if engine is None:
            return "skipped or taken, depending on the engine,"
        return "taken" if engine == "megatron" else "skipped"

    @property
    def schedule(self) -> Schedule:
        """The updates on each of its rollout batches, as far as its configuration says it."""
        return self.record.schedule
