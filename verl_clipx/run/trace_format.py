"""Traces: what the loss knew about every token of some responses, as Parquet files in a run's folder `traces`."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

from verl_clipx.common.files import file_names_in, read_table, replacing
from verl_clipx.run.decided_from import DecidedFrom

VERSION = 3
# Files of the version before this one are read too. They lack these fields.
_BEFORE = "2"
_SINCE = ("context", "turn")
SELECTED = "kept by entropy selection, and not rejected in bypass mode; missing where there is neither"
CONTEXT = "the tokens between it and the traced one before: of the prompt, or of a tool; missing: none"
_VERSION_KEY = b"clipx_trace_version"
_UPDATE_KEY = b"clipx_trace_update"
_ROWS_KEY = b"clipx_trace_rows"
_NAME = "step_{step:08d}_update_{update:04d}_rank_{rank:05d}.parquet"
_FILE = re.compile(r"step_([0-9]{8,18})_update_([0-9]{4,18})_rank_([0-9]{5,18})\.parquet")


# Of each field: its name, with ? where a value may be missing, its type and its meaning. There is a row for each token
# of whole responses. The tokens of a response are adjacent and in order.
_FIELDS = (
    ("step", pyarrow.int32(), "training step, counted from 1 as verl logs it"),
    ("update", pyarrow.int32(), "optimizer update within the step, from 0; a Lopti pass counts as one"),
    ("rank", pyarrow.int32(), "data-parallel rank"),
    ("prompt", pyarrow.string(), "the same for one prompt in every run: its hash"),
    ("prompt_text?", pyarrow.string(), "the prompt, decoded"),
    ("sample", pyarrow.int32(), "number of the response among those to the prompt in this step, from 0"),
    ("score?", pyarrow.float32(), "reward of the response, where the worker knows it"),
    ("position", pyarrow.int32(), "of the token in the response, from 0"),
    ("token_id", pyarrow.int32(), "in the policy's vocabulary"),
    ("text", pyarrow.string(), "the token, decoded when it was written"),
    ("log_prob", pyarrow.float32(), "under the current policy, in nats"),
    ("old_log_prob", pyarrow.float32(), "under the old policy, in nats"),
    ("rollout_log_prob?", pyarrow.float32(), "under the policy that sampled, in nats"),
    ("ratio", pyarrow.float32(), "current over old probability"),
    ("advantage", pyarrow.float32(), "after shaping"),
    ("bounded", pyarrow.float32(), "what the bounds act on: the ratio in most methods"),
    ("low", pyarrow.float32(), "lower bound on it; 0 or less on a ratio: none"),
    ("high", pyarrow.float32(), "upper bound on it; inf: none"),
    ("weight", pyarrow.float32(), "gradient weight F: the gradient of the objective is F * advantage"),
    ("region", pyarrow.string(), "LN, HP, LP, HN or M, after DGPO"),
    ("selected?", pyarrow.bool_(), SELECTED),
    ("entropy?", pyarrow.float32(), "of the current policy, in nats, where computed"),
    ("age?", pyarrow.int32(), "weight versions since its first token was sampled, where known"),
    ("unshaped_advantage", pyarrow.float32(), "before shaping"),
    ("correction?", pyarrow.float32(), "of the rollout, a factor on F; missing where there is none"),
    ("micro_batch", pyarrow.int32(), "within the update and rank, from 0"),
    ("group?", pyarrow.int64(), "the same for the responses that verl groups as one prompt's"),
    ("counted?", pyarrow.bool_(), "in this pass of Lopti's; missing without Lopti"),
    ("rejected?", pyarrow.bool_(), "by bypass mode or by +clipx/mask; missing where neither can"),
    ("context?", pyarrow.list_(pyarrow.int32()), CONTEXT),
    ("turn?", pyarrow.int32(), "of the policy's in the response, from 0: a tool's tokens end one"),
)
SCHEMA = pyarrow.schema(
    [pyarrow.field(name.rstrip("?"), kind, "?" in name, {"meaning": meaning}) for name, kind, meaning in _FIELDS],
    metadata={_VERSION_KEY: str(VERSION).encode()},
)


def regions_of(bounded: Any, low: Any, high: Any, advantages: Any) -> numpy.ndarray:
    """Return DGPO's region of each token, from columns of a trace, by the rules of `metrics.token_sums`."""
    above = bounded > high
    below = bounded < low
    # If the bounds cross, above wins.
    sides = [above & (advantages > 0), above & (advantages < 0), below & (advantages > 0), below & (advantages < 0)]
    return numpy.select(sides, ["HP", "HN", "LP", "LN"], "M")


@dataclass(frozen=True, order=True)
class Shard:
    """One file of a trace: what one rank saw in one update."""

    step: int
    update: int
    rank: int

    def path_in(self, folder: Path) -> Path:
        """Return the file's place in a run's folder of traces."""
        return folder / _NAME.format(step=self.step, update=self.update, rank=self.rank)


@dataclass(frozen=True)
class UpdateFacts:
    """What a file says of its update as a whole.

    Args:
        fraction: share of the prompts that is traced, in (0, 1].
        ranks: number of data-parallel ranks, each of which writes a file if it has traced tokens.
        decided_from: the tokens behind the bounds.
        decisions: number of a micro-batch to what the method decided for it; empty if it decides nothing.
        lost: how many of the rows that were written the file lacks; None if it is older and does not say how many.
    """

    fraction: float
    ranks: int
    decided_from: DecidedFrom
    decisions: Mapping[int, list[float]] = dataclasses.field(default_factory=dict)
    lost: int | None = 0


def write_shard(folder: Path, shard: Shard, columns: dict[str, Any], facts: UpdateFacts) -> Path:
    """Write one file of a trace, whole or not at all.

    Args:
        folder: the run's folder of traces.
        shard: the file.
        columns: from the name of a field of SCHEMA to its values, one per token, as a list or as a numpy or pyarrow
            array. `step`, `update` and `rank` are filled in from the shard. Nullable fields may be left out.
        facts: of the update. `lost` is not written: readers count from the number of rows what is lost.

    Returns:
        The file's path.

    Raises:
        ValueError: a field that must have values is missing or lacks some, a column is not a field of SCHEMA, or its
            values are of another type or number (pyarrow raises a TypeError for some types).
    """
    length = len(columns.get("token_id", ()))
    given = {
        **columns,
        "step": [shard.step] * length,
        "update": [shard.update] * length,
        "rank": [shard.rank] * length,
    }
    unknown = [name for name in given if name not in SCHEMA.names]
    missing = [field.name for field in SCHEMA if not field.nullable and field.name not in given]
    if unknown or missing:
        raise ValueError(f"trace: fields missing: {missing}, unknown: {unknown}; the schema has {SCHEMA.names}.")
    values_by_field = {field.name: given.get(field.name, [None] * length) for field in SCHEMA}
    table = pyarrow.table(values_by_field, schema=SCHEMA)
    written_facts = {name: value for name, value in asdict(facts).items() if name != "lost"}
    file_metadata = {_UPDATE_KEY: json.dumps(written_facts).encode(), _ROWS_KEY: str(length).encode()}
    table = table.replace_schema_metadata({**SCHEMA.metadata, **file_metadata})
    path = shard.path_in(folder)
    with replacing(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
    return path


def shards_in(folder: Path) -> list[Shard]:
    """Return the files of a run's trace, by step, update and rank; empty if the run wrote none."""
    names = filter(None, map(_FILE.fullmatch, file_names_in(folder)))
    return sorted(Shard(*map(int, name.groups())) for name in names)


def remove_shards(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> None:
    """Remove a trace's files of a step and of later ones; some may be gone already.

    If several ranks call this, each removes its own files, and together they also remove those of ranks that only an
    earlier, larger run had.

    Args:
        folder: the run's folder of traces.
        step: the first step whose files are removed.
        rank, ranks: of the caller, and how many call this. By default one caller removes the files of all ranks.
    """
    for shard in shards_in(folder):
        if shard.step >= step and shard.rank % ranks == rank:
            shard.path_in(folder).unlink(missing_ok=True)


def read_shards(folder: Path, shards: list[Shard]) -> pyarrow.Table:
    """Return the tokens of some files of a trace, a row for each, as SCHEMA says.

    Raises:
        ValueError: a file is no trace, one of another version, or not of SCHEMA; names the file and the columns.
    """
    return pyarrow.concat_tables([_read(shard.path_in(folder)) for shard in shards] or [SCHEMA.empty_table()])


def read_facts(folder: Path, shard: Shard) -> UpdateFacts:
    """Return what a file of a trace says about its update.

    Raises:
        ValueError: the file is no Parquet file, or what it says has another form; names the file.
    """
    path = shard.path_in(folder)
    try:
        file = pyarrow.parquet.read_metadata(path)
        metadata = file.metadata or {}
        lost = int(metadata[_ROWS_KEY]) - file.num_rows if _ROWS_KEY in metadata else None
        read = UpdateFacts(**json.loads(metadata.get(_UPDATE_KEY, b"")), lost=lost)
        decisions = {int(number): list(map(float, values)) for number, values in read.decisions.items()}
        return UpdateFacts(float(read.fraction), int(read.ranks), DecidedFrom(read.decided_from), decisions, lost)
    except (ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: {_UPDATE_KEY.decode()} cannot be read: {error}. Remove it to go on.") from None


def is_whole(shards: list[Shard], facts: list[UpdateFacts]) -> bool:
    """Return whether the files of an update have every token of it, of all ranks; `facts`: of each file."""
    has_all_tokens = all(file_facts.fraction == 1 and not file_facts.lost for file_facts in facts)
    has_all_ranks = {shard.rank for shard in shards} == set(range(facts[0].ranks))
    return has_all_tokens and has_all_ranks


def has_all_updates(shards: list[Shard], expected: int | None) -> bool:
    """Return whether the files of a step are of all its updates.

    Args:
        shards: the files.
        expected: the number of updates; None if unknown: then only a gap shows that an update is missing.
    """
    updates = {shard.update for shard in shards}
    return updates == set(range(max(expected or 0, len(updates))))


def _read(path: Path) -> pyarrow.Table:
    try:
        table = read_table(path)
    except ValueError as error:
        raise ValueError(f"{error} Remove it to go on without it.") from None
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version not in (_BEFORE, str(VERSION)):
        reads = f"{_BEFORE} and {VERSION}"
        raise ValueError(f"{path}: version {version} of the trace's schema; this verl-clipx reads {reads}.")
    if version == _BEFORE:
        for name in _SINCE:
            field = SCHEMA.field(name)
            table = table.append_column(field, pyarrow.nulls(len(table), field.type))
    faults = _faults(table)
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}. Remove it to go on without it.")
    # In SCHEMA's order, and without what others may have added.
    return table.select(SCHEMA.names).cast(SCHEMA)


def _faults(table: pyarrow.Table) -> list[str]:
    """Return what is not as SCHEMA says, each as a part of a sentence."""
    missing = [field.name for field in SCHEMA if field.name not in table.column_names]
    repeated = [field.name for field in SCHEMA if table.column_names.count(field.name) > 1]
    faults = [f"no column {', '.join(missing)}"] if missing else []
    faults += [f"column {name} occurs more than once" for name in repeated]
    for field in SCHEMA:
        if field.name in (*missing, *repeated):
            continue
        column = table.column(field.name)
        if column.type != field.type:
            faults.append(f"column {field.name} is of type {column.type}, expected {field.type}")
        elif column.null_count and not field.nullable:
            faults.append(f"column {field.name} has no value for some tokens")
    return faults
