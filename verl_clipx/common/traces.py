"""Traces: what the loss knew about every token of some responses, as Parquet files in a run's folder `traces`."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.common.files import file_names_in, read_table, replacing

VERSION = 2
# Version 1 lacks the fields of ADDED_IN_2 and what `UpdateFacts` says.
READ = (1, 2)
SELECTED = "kept by entropy selection, and not rejected in bypass mode; without either missing"
_VERSION_KEY = b"clipx_trace_version"
_UPDATE_KEY = b"clipx_trace_update"
_NAME = "step_{step:08d}_update_{update:04d}_rank_{rank:05d}.parquet"
_FILE = re.compile(r"step_([0-9]{8,18})_update_([0-9]{4,18})_rank_([0-9]{5,18})\.parquet")


def _field(name: str, kind: pyarrow.DataType, meaning: str, *, nullable: bool = False) -> pyarrow.Field:
    return pyarrow.field(name, kind, nullable, {"meaning": meaning})


# A row for each token of whole responses; the tokens of a response are adjacent and in order.
SCHEMA = pyarrow.schema(
    [
        _field("step", pyarrow.int32(), "training step, counted from 1 as verl logs it"),
        _field("update", pyarrow.int32(), "optimizer update within the step, from 0; a Lopti pass counts as one"),
        _field("rank", pyarrow.int32(), "data-parallel rank"),
        _field("prompt", pyarrow.string(), "the same for one prompt in every run: its hash"),
        _field("prompt_text", pyarrow.string(), "the prompt, decoded", nullable=True),
        _field("sample", pyarrow.int32(), "number of the response among those to the prompt in this step, from 0"),
        _field("score", pyarrow.float32(), "reward of the response, where the worker knows it", nullable=True),
        _field("position", pyarrow.int32(), "of the token in the response, from 0"),
        _field("token_id", pyarrow.int32(), "in the policy's vocabulary"),
        _field("text", pyarrow.string(), "the token, decoded when it was written"),
        _field("log_prob", pyarrow.float32(), "under the current policy, in nats"),
        _field("old_log_prob", pyarrow.float32(), "under the old policy, in nats"),
        _field("rollout_log_prob", pyarrow.float32(), "under the policy that sampled, in nats", nullable=True),
        _field("ratio", pyarrow.float32(), "current over old probability"),
        _field("advantage", pyarrow.float32(), "after shaping"),
        _field("bounded", pyarrow.float32(), "what the bounds act on: the ratio in most methods"),
        _field("low", pyarrow.float32(), "lower bound on it; 0 or less on a ratio: none"),
        _field("high", pyarrow.float32(), "upper bound on it; inf: none"),
        _field("weight", pyarrow.float32(), "gradient weight F: the gradient of the objective is F * advantage"),
        _field("region", pyarrow.string(), "LN, HP, LP, HN or M, after DGPO"),
        _field("selected", pyarrow.bool_(), SELECTED, nullable=True),
        _field("entropy", pyarrow.float32(), "of the current policy, in nats, where computed", nullable=True),
        _field("age", pyarrow.int32(), "weight versions since it was sampled, where known", nullable=True),
        _field("unshaped_advantage", pyarrow.float32(), "before shaping", nullable=True),
        _field("correction", pyarrow.float32(), "of the rollout, a factor on F; without one missing", nullable=True),
        _field("micro_batch", pyarrow.int32(), "within the update and rank, from 0", nullable=True),
        _field("group", pyarrow.int64(), "the same for the responses that verl groups as one prompt's", nullable=True),
        _field("counted", pyarrow.bool_(), "in this pass of Lopti's; without Lopti missing", nullable=True),
        _field("rejected", pyarrow.bool_(), "by bypass mode; where nothing can be missing", nullable=True),
    ],
    metadata={_VERSION_KEY: str(VERSION).encode()},
)
ADDED_IN_2 = ("unshaped_advantage", "correction", "micro_batch", "group", "counted", "rejected")


@dataclass(frozen=True, order=True)
class Shard:
    """One file of a trace: what one rank saw in one update."""

    step: int
    update: int
    rank: int

    def path_in(self, folder: Path) -> Path:
        """The file's place in a run's folder of traces."""
        return folder / _NAME.format(step=self.step, update=self.update, rank=self.rank)


@dataclass(frozen=True)
class UpdateFacts:
    """What a file says of its update as a whole.

    Args:
        fraction: share of the prompts that is traced, in (0, 1].
        ranks: number of data-parallel ranks, each of which writes a file if it has traced tokens.
        decided_from: the tokens behind the bounds.
        decisions: number of a micro-batch to what the method decided for it; empty if it decides nothing.
    """

    fraction: float
    ranks: int
    decided_from: DecidedFrom
    decisions: Mapping[int, list[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_json(cls, text: str) -> "UpdateFacts":
        """The facts that a file's metadata holds.

        Raises:
            ValueError: they have another form.
        """
        try:
            found = cls(**json.loads(text))
            decisions = {int(number): list(map(float, values)) for number, values in found.decisions.items()}
            return cls(float(found.fraction), int(found.ranks), DecidedFrom(found.decided_from), decisions)
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None


def write_shard(folder: Path, shard: Shard, columns: dict[str, Any], facts: UpdateFacts | None = None) -> Path:
    """Writes one file of a trace, whole or not at all.

    Args:
        columns: field of SCHEMA to a value for each token, as a list or an array of numpy's or pyarrow's; `step`,
            `update` and `rank` follow from the shard, and nullable fields may be missing.
        facts: those of the update; None: unknown, so that a replay of it is an estimate.

    Raises:
        ValueError: a field is missing or no field of SCHEMA.
    """
    length = len(columns.get("token_id", ()))
    given = {**columns, **{name: [getattr(shard, name)] * length for name in ("step", "update", "rank")}}
    unknown = [name for name in given if name not in SCHEMA.names]
    missing = [field.name for field in SCHEMA if not field.nullable and field.name not in given]
    if unknown or missing:
        raise ValueError(f"trace: fields missing: {missing}, unknown: {unknown}; the schema has {SCHEMA.names}.")
    table = pyarrow.table({field.name: given.get(field.name, [None] * length) for field in SCHEMA}, schema=SCHEMA)
    if facts is not None:
        table = table.replace_schema_metadata({**SCHEMA.metadata, _UPDATE_KEY: json.dumps(asdict(facts)).encode()})
    path = shard.path_in(folder)
    with replacing(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
    return path


def shards_in(folder: Path) -> list[Shard]:
    """The files of a run's trace, by step, update and rank; empty if the run wrote none."""
    found = (_FILE.fullmatch(name) for name in file_names_in(folder))
    return sorted(Shard(*map(int, one.groups())) for one in found if one)


def remove_shards(folder: Path, shards: list[Shard]) -> None:
    """Removes files of a trace; it does not matter if some are gone already."""
    for shard in shards:
        shard.path_in(folder).unlink(missing_ok=True)


def read_shards(folder: Path, shards: list[Shard]) -> pyarrow.Table:
    """The tokens of some files of a trace, a row for each, as SCHEMA says.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no trace, one of another version, or not of SCHEMA; names the file and the columns.
    """
    return pyarrow.concat_tables([_read(shard.path_in(folder)) for shard in shards] or [SCHEMA.empty_table()])


def read_facts(folder: Path, shard: Shard) -> UpdateFacts | None:
    """What a file of a trace says about its update; None if it says nothing, as in version 1.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no Parquet file, or what it says has another form; names the file.
    """
    path = shard.path_in(folder)
    try:
        text = (pyarrow.parquet.read_schema(path).metadata or {}).get(_UPDATE_KEY)
        return None if text is None else UpdateFacts.of_json(text.decode())
    except (ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: {_UPDATE_KEY.decode()} cannot be read: {error}. Remove it to go on.") from None


def is_whole(shards: list[Shard], facts: list[UpdateFacts | None]) -> bool:
    """Whether the files of an update have every token of it, of all ranks.

    Args:
        shards: of one update.
        facts: what each says, from `read_facts`.
    """
    known = [one for one in facts if one is not None and one.fraction == 1]
    return len(known) == len(shards) and {shard.rank for shard in shards} == set(range(known[0].ranks))


def has_all_updates(shards: list[Shard], expected: int | None) -> bool:
    """Whether the files of a step are of all its updates, the first to the last.

    Args:
        shards: of one step.
        expected: how many updates the step had; None: unknown, so that only a gap shows that one is missing.
    """
    updates = {shard.update for shard in shards}
    return updates == set(range(max(expected or 0, len(updates))))


def _read(path: Path) -> pyarrow.Table:
    try:
        table = read_table(path)
    except ValueError as error:
        raise ValueError(f"{error} Remove it to go on without it.") from None
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version not in map(str, READ):
        known = " and ".join(map(str, READ))
        raise ValueError(f"{path}: version {version} of the trace's schema; this verl-clipx reads versions {known}.")
    if version == "1":
        for name in (name for name in ADDED_IN_2 if name not in table.column_names):
            table = table.append_column(SCHEMA.field(name), pyarrow.nulls(len(table), SCHEMA.field(name).type))
    faults = _faults(table)
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}. Remove it to go on without it.")
    # In SCHEMA's order, and without what others may have added.
    return table.select(SCHEMA.names).cast(SCHEMA)


def _faults(table: pyarrow.Table) -> list[str]:
    """What is not as SCHEMA says, each as a part of a sentence."""
    missing = [field.name for field in SCHEMA if field.name not in table.column_names]
    repeated = [field.name for field in SCHEMA if table.column_names.count(field.name) > 1]
    faults = [f"no column {', '.join(missing)}"] if missing else []
    faults += [f"column {name} stands in it more than once" for name in repeated]
    for field in (field for field in SCHEMA if field.name not in (*missing, *repeated)):
        found = table.column(field.name)
        if found.type != field.type:
            faults.append(f"column {field.name} is of type {found.type}, expected {field.type}")
        elif found.null_count and not field.nullable:
            faults.append(f"column {field.name} lacks values, expected one a token")
    return faults
