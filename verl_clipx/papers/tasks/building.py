"""Builds a data set from its definition: one Parquet file per split, deduplicated and hashed, written atomically.

Every file records in its own metadata how it was built. Therefore no second file, which might contradict it, has to say
that it is finished.
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

# Length in bytes of the digests by which prompts and ground truths are compared.
_DIGEST_LENGTH = 16

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
    # The options as they would be read from a file's record, so that the requests can be compared.
    options = json.loads(json.dumps(options or {}))
    request = BuildRequest(
        dataset=definition.name,
        split=split,
        prompt=prompt,
        source=_describe_source(definition, source),
        limit=limit,
        options=options,
    )
    _check_request(definition, request)
    path = folder / f"{split}.parquet"
    if path.exists():
        record = read_record(path)
        if record is None:
            raise FileExistsError(
                f"{path} already exists and was made by something else; remove it or choose another folder"
            )
        if record.request != request:
            difference = _describe_difference(record.request, request)
            raise FileExistsError(
                f"{path} already exists and was made with {difference}; remove it or choose another folder"
            )
        return record
    counts = _Counts()
    rows = definition.rows(source, split=split, prompt=prompt, **options)
    rows = _check_columns(rows, definition.name)
    if not definition.repeats:
        rows = _drop_duplicates(rows, counts)
    try:
        table = _fill_table(islice(rows, limit), counts)
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
            f"{definition.name}, {split}: rows of different types ({error}); give each field one type"
        ) from error
    return record


def _describe_difference(before: BuildRequest, after: BuildRequest) -> str:
    """Return how two requests differ, such as "split='train', not 'test'"."""
    values_before = asdict(before)
    values_after = asdict(after)
    differences = []
    for key, value in values_before.items():
        if value != values_after[key]:
            differences.append(f"{key}={value!r}, not {values_after[key]!r}")
    return ", ".join(differences)


def read_record(path: Path) -> SplitRecord | None:
    """Return how `build_split` made a Parquet file; None if the file does not exist, or `build_split` did not make it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except FileNotFoundError:
        return None
    except OSError as error:
        is_fault_of_system = error.errno is not None
        if is_fault_of_system:
            raise
        # pyarrow raises an OSError without a number if the file's metadata are damaged.
        return None
    except pa.ArrowException:
        # The file is not in Parquet format, or was not finished.
        return None
    if METADATA_KEY not in metadata:
        return None
    try:
        content = parse_json(metadata[METADATA_KEY], str(path))
        request = BuildRequest(**content.pop("request"))
        return SplitRecord(request=request, **content)
    except (ValueError, AttributeError, KeyError, TypeError):
        # The record has another form, as another version of this package may have written it.
        return None


def normalise_prompt(prompt: Iterable[dict[str, str]]) -> str:
    """Return a prompt's text for comparison.

    It is normalised by NFKC, without differences of case, and with one blank for any white space.
    """
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
    """Counts rows that are kept, duplicates and conflicts (see `SplitRecord`), and hashes the rows that are kept."""

    def __init__(self) -> None:
        self.kept = 0
        self.duplicates = 0
        self.conflicts = 0
        self.hash = hashlib.sha256()


def _check_columns(rows: Iterable[Row], name: str) -> Iterator[Row]:
    """Yield rows after checking that they have verl's columns.

    Args:
        name: the name of the data set, for the message.

    Raises:
        ValueError: a row has other columns.
    """
    for row in rows:
        if set(row) != _COLUMNS:
            raise ValueError(f"{name}: a row has the columns {sorted(row)}; verl's rows have {sorted(_COLUMNS)}")
        yield row


def _drop_duplicates(rows: Iterable[Row], counts: _Counts) -> Iterator[Row]:
    """Yield the rows whose prompt is new. Count the others and their conflicts in `counts`."""
    # Only digests are kept, because a data set may have 57,000 long prompts.
    truth_digests: dict[bytes, bytes] = {}
    for row in rows:
        prompt = normalise_prompt(row["prompt"]).encode("utf-8", errors="surrogatepass")
        truth = row_line({"ground_truth": row["reward_model"]["ground_truth"]})
        prompt_digest = _digest(prompt)
        truth_digest = _digest(truth)
        if prompt_digest not in truth_digests:
            truth_digests[prompt_digest] = truth_digest
            yield row
            continue
        counts.duplicates += 1
        if truth_digests[prompt_digest] != truth_digest:
            counts.conflicts += 1


def _digest(content: bytes) -> bytes:
    """Return the first bytes of a content's SHA-256."""
    return hashlib.sha256(content).digest()[:_DIGEST_LENGTH]


def _fill_table(rows: Iterator[Row], counts: _Counts) -> pa.Table:
    """Return all rows as one table. Count and hash them in `counts`."""
    # Arrow's columns take much less memory than Python's rows. A field that a chunk lacks is null in it.
    chunks: list[pa.Table] = []
    while True:
        chunk = list(islice(rows, ROWS_PER_CHUNK))
        if not chunk:
            break
        for row in chunk:
            counts.hash.update(row_line(row))
        counts.kept += len(chunk)
        chunks.append(pa.Table.from_pylist(chunk))
    if not chunks:
        return pa.table({})
    return pa.concat_tables(chunks, promote_options="permissive")


def _check_request(definition: DatasetDefinition, request: BuildRequest) -> None:
    """Raise ValueError if a data set cannot be built as it is requested."""
    if request.split not in definition.splits:
        raise ValueError(f"split={request.split!r} does not fit {definition.name}, only {', '.join(definition.splits)}")
    if request.prompt not in definition.prompts:
        raise ValueError(
            f"prompt={request.prompt!r} does not fit {definition.name}, only {', '.join(definition.prompts)}"
        )
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit={request.limit} is below 1; give the number of rows to keep at most")
    if definition.generated and request.source != "generated":
        raise ValueError(f"the problems of {definition.name} are generated; leave out --from")
    known = option_names(definition)
    hints = get_type_hints(definition.rows)
    for key, value in request.options.items():
        if key not in known:
            raise ValueError(f"option {key!r} is unknown to {definition.name}: {', '.join(known) or 'it has none'}")
        if not _has_type(value, hints[key]):
            kind = _describe_type(hints[key])
            raise ValueError(f"option {key}={value!r} of {definition.name} is not of the type {kind}")


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has an option's type: a plain type, a union of them, or a sequence."""
    if get_origin(hint) is Sequence:
        (item_hint,) = get_args(hint)
        return isinstance(value, list) and all(_has_type(item, item_hint) for item in value)
    # To Python, True is an integer, but it is no number of puzzles.
    return isinstance(value, hint) and not isinstance(value, bool)


def _describe_type(hint: Any) -> str:
    """Return the name of an option's type for a message, such as "int | None" or "list[int]"."""
    if isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("collections.abc.Sequence", "list")


def option_names(definition: DatasetDefinition) -> tuple[str, ...]:
    """Return the names of the options that a data set's `rows` accepts."""
    names = []
    for parameter in inspect.signature(definition.rows).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("split", "prompt"):
            names.append(parameter.name)
    return tuple(names)


def _describe_source(definition: DatasetDefinition, source: Path | None) -> str:
    """Return the `source` of a `BuildRequest`.

    Args:
        source: the local copy; None for the hub or a generator.
    """
    if source is None:
        return f"hub:{definition.hub}" if definition.hub else "generated"
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give the local copy's file or folder")
    if source.is_file():
        return f"{source.name} sha256:{hash_of_file(source)}"
    # Of a folder, only names and sizes are hashed: reading thousands of files would take too long.
    files = sorted(path for path in source.rglob("*") if path.is_file())
    listing = "\n".join(f"{path.relative_to(source).as_posix()} {path.stat().st_size}" for path in files)
    return f"{source.name} sha256:{hashlib.sha256(listing.encode()).hexdigest()}"
