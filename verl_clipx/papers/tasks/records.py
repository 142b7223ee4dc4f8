"""Reads the records of a data set's source: a local copy in the usual file formats, or the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_clipx.common.files import parquet_file, parse_json, read_json, read_lines

Record = dict[str, Any]

SUFFIXES = (".parquet", ".jsonl", ".json")


def read_records(source: Path | None, *, hub: str, hub_split: str, hub_config: str | None = None) -> Iterator[Record]:
    """Yield the records of a local copy, or of a split on the hub if there is no copy.

    Args:
        source: the local copy, as for `local_records`; None for the hub.
        hub: the repository on the hub.
        hub_split, hub_config: the part of the repository.
    """
    if source is not None:
        yield from local_records(source)
        return
    import datasets

    yield from datasets.load_dataset(hub, hub_config, split=hub_split)


def local_records(source: Path) -> Iterator[Record]:
    """Yield the records of a local copy, in file order.

    Args:
        source: a .parquet, .jsonl or .json file (an array of objects), or a folder of such files. A folder is searched
            with its subfolders, and its files are read in the order of their paths.

    Raises:
        FileNotFoundError: the source does not exist, or is a folder without such a file.
        ValueError: a file does not have the format that its name says; the message names the file and the place.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give the local copy's file or folder")
    for path in _files_of(source):
        if path.suffix == ".parquet":
            with parquet_file(path) as file:
                for batch in file.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
        elif path.suffix == ".jsonl":
            yield from read_jsonl(path)
        elif path.suffix == ".json":
            content = read_json(path)
            records = content if isinstance(content, list) else [content]
            for number, record in enumerate(records, 1):
                yield _object(record, f"{path}, entry {number}")
        else:
            raise ValueError(f"{path}: the kind {path.suffix!r} is unknown; give one of {', '.join(SUFFIXES)}")


def _files_of(source: Path) -> list[Path]:
    """Return a file alone, or the files of a folder that have one of SUFFIXES.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    if source.is_file():
        return [source]
    files = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES)
    if not files:
        raise FileNotFoundError(f"{source} contains no file that ends in {', '.join(SUFFIXES)}")
    return files


def read_jsonl(path: Path) -> Iterator[Record]:
    """Yield the objects of a file with one JSON object per line; empty lines are skipped. See `local_records`."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _object(parse_json(line, where), where)


def _object(record: Any, where: str) -> Record:
    """Return a record after checking that it is a JSON object.

    Args:
        where: the file and the place, for the message.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__}, not an object; is it the data file?")
    return record
