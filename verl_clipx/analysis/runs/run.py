"""A run as the commands that read runs see it: its numbers, its configuration and where its traces are.

Importing this takes no library but pandas.
"""

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

# A run's name as the recipes write it: the setting, then the seed.
_NAME_WITH_SEED = re.compile(r"(?P<setting>.+?)-seed(?P<seed>\d+)")


# Two runs are the same only if they are one object: tables have no truth value.
@dataclass(frozen=True, eq=False)
class Run:
    """A run.

    Args:
        name: the name of its folder or of its log.
        log: a row for each step, a column for each metric, from `run_log.table_of`.
        configuration: from a dotted key to what the record keeps of its value; empty if none was written down.
        record: what the run is. By default it is made from the configuration. The configuration is then replaced by
            the part of it that the record keeps.
        held_out: the rewards of its validations that have a finite score.
        traces: the folder where its traces are, if it wrote any.
        batches: from a step to the fingerprints of its rollout batch, as `training.worker.fingerprints` makes them;
            empty for a log that has none.
        not_finite: from a metric to the steps at which it was logged as NaN, infinity or null. `keys.HELD_OUT` stands
            for the steps whose validation has a sample with such a score.
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
        """The files of its traces: each has the tokens that one rank traced in one update. Empty without traces."""
        # This import takes long: it imports pyarrow.
        from verl_clipx.run.trace_format import shards_in

        if self.traces is None:
            return []
        return shards_in(self.traces)

    def shards_at(self, step: int, update: int | None = None) -> list["Shard"]:
        """Return the files of a step's traces.

        Args:
            step: the training step.
            update: the number of an update on the step's rollout batch, from 0; None for all updates.
        """
        shards_of_step = [shard for shard in self.shards if shard.step == step]
        if update is None:
            return shards_of_step
        return [shard for shard in shards_of_step if shard.update == update]

    @property
    def seed(self) -> int | None:
        """The seed of the data's order, data.seed; None if it is unknown.

        If the record does not have it, it is the seed in the run's name, such as `acpo-seed3`.
        """
        if self.record.seeds.data is not None:
            return self.record.seeds.data
        match = _NAME_WITH_SEED.fullmatch(self.name)
        return int(match["seed"]) if match else None

    @property
    def method(self) -> str:
        """The name of the loss that it trained with, without `clipx_`.

        This is the plugin's method. If the plugin only observes, or is not used, it is verl's loss_mode. If neither is
        written down, it is the run's name without the seed.
        """
        loss = self.record.loss
        is_loss_of_verl = loss.method in (None, OBSERVE)
        method = loss.mode if is_loss_of_verl else loss.method
        if not method:
            match = _NAME_WITH_SEED.fullmatch(self.name)
            method = match["setting"] if match else self.name
        return str(method).removeprefix("clipx_")

    @property
    def loss(self) -> str:
        """The name of the loss in reports: `ACPO`; for a user's own loss, the name of its function."""
        own_function = self.record.loss.function
        if own_function:
            # It is written as package.module:name.
            return str(own_function).rpartition(":")[2]
        if self.method == self.name:
            return self.name
        return self.method.upper().replace("_", " ")

    @cached_property
    def significant(self) -> dict[str, str]:
        """The values that make up its setting, from a dotted key to JSON; see `sameness.setting_of_run`."""
        from verl_clipx.analysis.runs.sameness import setting_of_run

        values = setting_of_run(self.configuration)
        return {key: json.dumps(value, default=str) for key, value in sorted(values.items())}

    def values(self, key: str) -> pandas.Series:
        """Return a metric's finite values by step; empty if the run logged none."""
        if key not in self.log:
            return pandas.Series(dtype=float)
        values = self.log[key]
        return values[numpy.isfinite(values)]

    @property
    def takes_not_finite_updates(self) -> bool | None:
        """Whether verl 0.9.1 takes updates whose gradient is not finite; None if the run's engine is unknown.

        It takes them under Megatron, and skips them under every other engine.
        """
        engine = self.record.training.name
        return None if engine is None else engine == "megatron"

    @property
    def schedule(self) -> Schedule:
        """The updates on each of its rollout batches, as far as its configuration says it."""
        return self.record.schedule
