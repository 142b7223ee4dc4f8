"""Builds a data set from its definition: one Parquet file per split, deduplicated and hashed, written atomically.

Every file records in its own metadata how it was built. It can therefore be recognised as finished without a second
file, which might contradict it.
"""

import hashlib
import inspect
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from verl_clipx.common.files import hash_of_file, parse_json, replacing
from verl_clipx.papers.tasks.definition import DatasetDefinition, Row

METADATA_KEY = b"verl_clipx.build"

ROWS_PER_CHUNK = 4096

_COLUMNS = {"data_source", "prompt", "ability", "reward_model", "extra_info"}


@dataclass(frozen=True)
class BuildRequest:
    """Everything that determines a split's content.

    Args:
        source: `hub:<repository>`, `generated`, or the local copy's name and fingerprint.
    """

    dataset: str
    split: str
    prompt: str
    source: str
    limit: int | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitRecord:
    """A finished split.

    Args:
        duplicates: number of rows that were left out because an earlier one has the same prompt, apart from case, white
            space and Unicode form.
        conflicts: number of these duplicates whose ground truth differs from that of the row that was kept.
        sha256: hash of the rows (see `row_line`), independent of Parquet's version and layout.
    """

    request: BuildRequest
    rows: int
    duplicates: int
    conflicts: int
    sha256: str


def build_split(
    definition: DatasetDefinition,
    folder: Path,
    *,
    split: str,
    prompt: str | None = None,
    source: Path | None = None,
    limit: int | None = None,
    options: dict[str, Any] | None = None,
) -> SplitRecord:
    """Write one split to `<folder>/<split>.parquet`, unless the same request was finished there before.

    Args:
        prompt: one of the definition's templates; None for its default.
        source: the local copy; None for the hub or a generator.
        limit: largest number of rows to keep, at least 1; None for all.

    Raises:
        FileExistsError: the file exists, but another request or another program made it.
        FileNotFoundError: the source is missing.
        ValueError: an argument is unknown or out of range, a row lacks a column, or there are no rows.
    """
    prompt = prompt or definition.prompts[0]
    options = json.loads(json.dumps(options or {}))  # as they come back from the file
    request = BuildRequest(
        dataset=definition.name,
        split=split,
        prompt=prompt,
        source=_describe_source(definition, source),
        limit=limit,
        options=options,
    )
    _check(definition, request)
    path = folder / f"{split}.parquet"
    if path.exists():
        record = read_record(path)
        if record is not None and record.request == request:
            return record
        before = asdict(record.request) if record else {}
        after = asdict(request)
        changes = [f"{key}={before[key]!r}, not {after[key]!r}" for key in before if before[key] != after[key]]
        made_by = f"with {', '.join(changes)}" if record else "by something else"
        raise FileExistsError(f"{path} already exists and was made {made_by}; remove it or choose another folder")
    counts = _Counts()
    rows = definition.rows(source, split=split, prompt=prompt, **options)
    if not definition.repeats:
        rows = _unique(rows, counts)
    try:
        table = _table(islice(rows, limit), counts, definition.name)
        if not counts.kept:
            raise ValueError(
                f"{definition.name}, {split}: no rows from {request.source}; verl cannot load an empty file"
            )
        record = SplitRecord(
            request=request,
            rows=counts.kept,
            duplicates=counts.duplicates,
            conflicts=counts.conflicts,
            sha256=counts.hash.hexdigest(),
        )
        metadata = {METADATA_KEY: json.dumps(asdict(record), sort_keys=True).encode()}
        with replacing(path) as partial:
            pq.write_table(table.replace_schema_metadata(metadata), partial, row_group_size=ROWS_PER_CHUNK)
    except pa.ArrowException as error:
        raise ValueError(
            f"{definition.name}, {split}: rows of different types ({error}); give each field one"
        ) from error
    return record


def read_record(path: Path) -> SplitRecord | None:
    """Return how a Parquet file was built, or None if `build_split` did not finish it."""
    try:
        content = parse_json((pq.read_metadata(path).metadata or {})[METADATA_KEY], str(path))
        return SplitRecord(**(content | {"request": BuildRequest(**content["request"])}))
    except (OSError, ValueError, KeyError, TypeError):
        # pyarrow raises its own kinds of ValueError for a file that is incomplete or not in Parquet format.
        return None


def normalise_prompt(prompt: Iterable[dict[str, str]]) -> str:
    """Return a prompt's text for comparison: in NFKC and lower case, with single blanks as white space."""
    text = "\n".join(f"{message['role']}\0{message['content']}" for message in prompt)
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def row_line(row: Row) -> bytes:
    """Return a row as one line of canonical JSON (sorted keys, no blanks, UTF-8), including the line end.

    A split's hash is the SHA-256 of these lines, in order.

    Raises:
        ValueError, TypeError: the row contains something that JSON cannot represent, such as NaN.
    """
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", errors="surrogatepass") + b"\n"


class _Counts:
    def __init__(self) -> None:
        self.kept = self.duplicates = self.conflicts = 0
        self.hash = hashlib.sha256()


def _unique(rows: Iterable[Row], counts: _Counts) -> Iterator[Row]:
    # Ground truths by prompt, as digests, so that 57,000 long prompts need not be kept.
    truths: dict[bytes, bytes] = {}
    for row in rows:
        prompt = normalise_prompt(row["prompt"]).encode("utf-8", errors="surrogatepass")
        truth = row_line({"ground_truth": row["reward_model"]["ground_truth"]})
        key, truth = (hashlib.sha256(text).digest()[:16] for text in (prompt, truth))
        if key not in truths:
            truths[key] = truth
            yield row
        else:
            counts.duplicates += 1
            counts.conflicts += truths[key] != truth


def _table(rows: Iterator[Row], counts: _Counts, name: str) -> pa.Table:
    # Arrow's columns take much less memory than Python's rows. A field that a chunk lacks is null in it.
    chunks: list[pa.Table] = []
    while chunk := list(islice(rows, ROWS_PER_CHUNK)):
        for row in chunk:
            if set(row) != _COLUMNS:
                raise ValueError(f"{name}: a row has the columns {sorted(row)}; verl's rows have {sorted(_COLUMNS)}")
            counts.hash.update(row_line(row))
        counts.kept += len(chunk)
        chunks.append(pa.Table.from_pylist(chunk))
    return pa.concat_tables(chunks, promote_options="permissive") if chunks else pa.table({})


def _check(definition: DatasetDefinition, request: BuildRequest) -> None:
    for key, value in (("split", request.split), ("prompt", request.prompt)):
        known = getattr(definition, f"{key}s")
        if value not in known:
            raise ValueError(f"{key}={value!r} does not fit {definition.name}, only {', '.join(known)}")
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit={request.limit} is below 1; give the number of rows to keep at most")
    if definition.generated and request.source != "generated":
        raise ValueError(f"the problems of {definition.name} are generated; leave out --from")
    known = option_names(definition)
    hints = get_type_hints(definition.rows)
    for key, value in request.options.items():
        if key not in known:
            raise ValueError(f"option {key!r} is unknown to {definition.name}: {', '.join(known) or 'it has none'}")
        if not _is_of(value, hints[key]):
            kind = hints[key].__name__ if isinstance(hints[key], type) else hints[key]
            kind = str(kind).replace("collections.abc.Sequence", "list")
            raise ValueError(f"option {key}={value!r} of {definition.name} is not of the type {kind}")


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has an option's type: a plain type, a union of them, or a sequence."""
    if get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_is_of(item, get_args(hint)[0]) for item in value)
    # To Python, True is an integer, but it is no number of puzzles.
    return isinstance(value, hint) and not isinstance(value, bool)


def option_names(definition: DatasetDefinition) -> tuple[str, ...]:
    """Return the names of the options that a data set's `rows` accepts."""
    parameters = inspect.signature(definition.rows).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("split", "prompt"))


def _describe_source(definition: DatasetDefinition, source: Path | None) -> str:
    if source is None:
        return f"hub:{definition.hub}" if definition.hub else "generated"
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give the local copy's file or folder")
    if source.is_file():
        return f"{source.name} sha256:{hash_of_file(source)}"
    # Only names and sizes: hashing the content of thousands of files would take too long.
    files = sorted(path for path in source.rglob("*") if path.is_file())
    listing = "\n".join(f"{path.relative_to(source).as_posix()} {path.stat().st_size}" for path in files)
    return f"{source.name} sha256:{hashlib.sha256(listing.encode()).hexdigest()}"
