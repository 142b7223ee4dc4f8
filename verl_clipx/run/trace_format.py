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
# Files of this older version are read too. They lack the fields below.
_OLDER_VERSION = "2"
_FIELDS_SINCE_OLDER_VERSION = ("context", "turn")
_SELECTED = (
    "kept by entropy selection, and neither rejected by bypass mode nor taken out by +clipx/mask; missing where none "
    "of these can act"
)
_CONTEXT = "the tokens between it and the traced one before: of the prompt, or of a tool; missing: none"
_VERSION_KEY = b"clipx_trace_version"
_UPDATE_KEY = b"clipx_trace_update"
_ROWS_KEY = b"clipx_trace_rows"
_NAME = "step_{step:08d}_update_{update:04d}_rank_{rank:05d}.parquet"
_FILE = re.compile(r"step_([0-9]{8,18})_update_([0-9]{4,18})_rank_([0-9]{5,18})\.parquet")


# The name of each field, its type and its meaning. A name ends with ? if values may be missing. A row is a token.
# Responses are traced whole, and the tokens of a response are adjacent and in order.
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
    ("selected?", pyarrow.bool_(), _SELECTED),
    ("entropy?", pyarrow.float32(), "of the current policy, in nats, where computed"),
    ("age?", pyarrow.int32(), "weight versions since its first token was sampled, where known"),
    ("unshaped_advantage", pyarrow.float32(), "before shaping"),
    ("correction?", pyarrow.float32(), "of the rollout, a factor on F; missing where there is none"),
    ("micro_batch", pyarrow.int32(), "within the update and rank, from 0"),
    ("group?", pyarrow.int64(), "the same for the responses that verl groups as one prompt's"),
    ("counted?", pyarrow.bool_(), "in this pass of Lopti's; missing without Lopti"),
    ("rejected?", pyarrow.bool_(), "by bypass mode or by +clipx/mask; missing where neither can"),
    ("context?", pyarrow.list_(pyarrow.int32()), _CONTEXT),
    ("turn?", pyarrow.int32(), "of the policy's in the response, from 0: a tool's tokens end one"),
)
SCHEMA = pyarrow.schema(
    [pyarrow.field(name.rstrip("?"), kind, "?" in name, {"meaning": meaning}) for name, kind, meaning in _FIELDS],
    metadata={_VERSION_KEY: str(VERSION).encode()},
)


def regions_of(bounded: Any, low: Any, high: Any, advantages: Any) -> numpy.ndarray:
    """Return the name of DGPO's region of each token, by the rules of `losses.applying.metrics.token_sums`.

    Args:
        bounded, low, high, advantages: columns of a trace, as arrays of the same length.
    """
    above = bounded > high
    below = bounded < low
    positive = advantages > 0
    negative = advantages < 0
    # If the bounds cross, a token may be above and below at once. The first condition that holds decides.
    conditions = [above & positive, above & negative, below & positive, below & negative]
    return numpy.select(conditions, ["HP", "HN", "LP", "LN"], "M")


@dataclass(frozen=True, order=True)
class Shard:
    """One file of a trace: what one rank saw in one update."""

    step: int
    update: int
    rank: int

    def path_in(self, folder: Path) -> Path:
        """Return the file's path in a run's folder of traces."""
        return folder / _NAME.format(step=self.step, update=self.update, rank=self.rank)


@dataclass(frozen=True)
class UpdateFacts:
    """What a file says of its update as a whole.

    Args:
        fraction: the share of the prompts that is traced, in (0, 1].
        ranks: the number of data-parallel ranks, each of which writes a file if it has traced tokens.
        decided_from: the tokens from which the bounds were decided.
        decisions: by the number of a micro-batch, the numbers that the method decided for it, such as its bounds; empty
            if the method decides nothing.
        lost: the number of rows that were written and are missing in the file; None for a file of an older version of
            the plugin, which does not record how many rows were written.
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
        shard: the step, the update and the rank of the tokens. They give the file its name.
        columns: the values of each field of SCHEMA, one per token, by the field's name. Values are a list, or a numpy
            or pyarrow array; the numbers of a list are converted to the field's type. `token_id` gives the number of
            tokens. `step`, `update` and `rank` are filled in from `shard`. Nullable fields may be left out.
        facts: what is true of the update as a whole. `lost` is not written. The number of rows is written in its place,
            with which a reader compares the rows that the file has.

    Returns:
        The file's path.

    Raises:
        ValueError: a field that must have values is missing or lacks some, a column is not a field of SCHEMA, or has
            another length than `token_id`, or is an array of another type (pyarrow raises a TypeError for some types).
    """
    rows = len(columns.get("token_id", ()))
    given = {
        **columns,
        "step": [shard.step] * rows,
        "update": [shard.update] * rows,
        "rank": [shard.rank] * rows,
    }
    unknown = [name for name in given if name not in SCHEMA.names]
    missing = [field.name for field in SCHEMA if not field.nullable and field.name not in given]
    if unknown or missing:
        raise ValueError(f"trace: fields missing: {missing}, unknown: {unknown}; the schema has {SCHEMA.names}.")
    values_by_field = {field.name: given.get(field.name, [None] * rows) for field in SCHEMA}
    table = pyarrow.table(values_by_field, schema=SCHEMA)
    facts_to_write = asdict(facts)
    del facts_to_write["lost"]
    file_metadata = {_UPDATE_KEY: json.dumps(facts_to_write).encode(), _ROWS_KEY: str(rows).encode()}
    table = table.replace_schema_metadata({**SCHEMA.metadata, **file_metadata})
    path = shard.path_in(folder)
    with replacing(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
    return path


def shards_in(folder: Path) -> list[Shard]:
    """Return the files of a run's trace, ordered by step, update and rank; empty if the run wrote none."""
    shards = []
    for name in file_names_in(folder):
        match = _FILE.fullmatch(name)
        if match is not None:
            step, update, rank = map(int, match.groups())
            shards.append(Shard(step=step, update=update, rank=rank))
    return sorted(shards)


def remove_shards(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> None:
    """Remove a trace's files of a step and of later ones; some may be gone already.

    If several ranks call this, each removes its own files, and together they also remove those of ranks that only an
    earlier, larger run had.

    Args:
        folder: the run's folder of traces.
        step: the first step whose files are removed.
        rank: the caller's rank.
        ranks: the number of ranks that call this. By default a single caller removes the files of all ranks.
    """
    for shard in shards_in(folder):
        if shard.step >= step and shard.rank % ranks == rank:
            shard.path_in(folder).unlink(missing_ok=True)


def read_shards(folder: Path, shards: list[Shard]) -> pyarrow.Table:
    """Return the tokens of some files of a trace, one in a row, with the columns of SCHEMA.

    Args:
        folder: the run's folder of traces.
        shards: the files, in the order of the rows.

    Raises:
        ValueError: a file is no trace, has a version that cannot be read, or has other columns than SCHEMA says; the
            message names the file and the columns.
    """
    tables = [_read(shard.path_in(folder)) for shard in shards]
    if not tables:
        return SCHEMA.empty_table()
    return pyarrow.concat_tables(tables)


def read_facts(folder: Path, shard: Shard) -> UpdateFacts:
    """Return what a file of a trace says about its update.

    Raises:
        ValueError: the file is no Parquet file, or its facts are missing or damaged; the message names the file.
    """
    path = shard.path_in(folder)
    try:
        file = pyarrow.parquet.read_metadata(path)
        metadata = file.metadata or {}
        lost = None
        if _ROWS_KEY in metadata:
            lost = int(metadata[_ROWS_KEY]) - file.num_rows
        read = UpdateFacts(**json.loads(metadata.get(_UPDATE_KEY, b"")), lost=lost)
        # JSON has texts for the numbers of micro-batches and for `decided_from`.
        return UpdateFacts(
            fraction=float(read.fraction),
            ranks=int(read.ranks),
            decided_from=DecidedFrom(read.decided_from),
            decisions={int(number): list(map(float, values)) for number, values in read.decisions.items()},
            lost=lost,
        )
    except (ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: {_UPDATE_KEY.decode()} cannot be read: {error}. Remove it to go on.") from None


def is_whole(shards: list[Shard], facts: list[UpdateFacts]) -> bool:
    """Return whether the files of an update have all of its tokens, from all ranks.

    Args:
        shards: the files, at least one.
        facts: what each of these files says of the update.
    """
    has_all_tokens = all(file_facts.fraction == 1 and not file_facts.lost for file_facts in facts)
    has_all_ranks = {shard.rank for shard in shards} == set(range(facts[0].ranks))
    return has_all_tokens and has_all_ranks


def has_all_updates(shards: list[Shard], expected: int | None) -> bool:
    """Return whether there is a file for each update of a step.

    Args:
        shards: the step's files.
        expected: the number of updates; None if it is unknown. Then a missing update is noticed only if a later one has
            a file.
    """
    updates = {shard.update for shard in shards}
    return updates == set(range(max(expected or 0, len(updates))))


def _read(path: Path) -> pyarrow.Table:
    try:
        table = read_table(path)
    except ValueError as error:
        raise ValueError(f"{error} Remove it to go on without it.") from None
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version not in (_OLDER_VERSION, str(VERSION)):
        readable = f"{_OLDER_VERSION} and {VERSION}"
        raise ValueError(f"{path}: version {version} of the trace's schema; this verl-clipx reads {readable}.")
    if version == _OLDER_VERSION:
        for name in _FIELDS_SINCE_OLDER_VERSION:
            field = SCHEMA.field(name)
            table = table.append_column(field, pyarrow.nulls(len(table), field.type))
    faults = _faults(table)
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}. Remove it to go on without it.")
    # In SCHEMA's order, and without columns that another program may have added.
    return table.select(SCHEMA.names).cast(SCHEMA)


def _faults(table: pyarrow.Table) -> list[str]:
    """Return the ways in which a table differs from SCHEMA, each as a part of a sentence."""
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
