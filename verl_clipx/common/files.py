"""A user's files, which are written completely or not at all, and which errors name.

The functions that read a file raise OSError if it is not there or cannot be read, and ValueError if it is no file or
not of the expected kind.
"""

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow
    from omegaconf import DictConfig

GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip compressed."""

EMPTY: Mapping[Any, Any] = MappingProxyType({})


@contextlib.contextmanager
def _naming_file_in_errors(path: Path) -> Iterator[None]:
    """Make errors within the block name the file, since the OSError of a full disk or of a failed read names none."""
    try:
        yield
    except OSError as error:
        # With a file name but without a number, the error's text would be "[Errno None] None: 'path'".
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make errors within a block that reads a file name it.

    A MemoryError becomes a ValueError: a file that does not fit into memory is probably the wrong one.
    """
    try:
        with _naming_file_in_errors(path):
            yield
    except MemoryError:
        raise ValueError(f"{path}: larger than this machine's memory; is it the right file?") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. When the block ends without an exception, that file becomes `path`.

    The file is flushed to the disk before it is renamed, so that after a crash `path` is the old file or the new one,
    never a part. The folder of `path` is made if it is missing.

    Raises:
        OSError: the file cannot be written, for instance because `path` is a folder.
        ValueError: the machine has too little memory to write the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with _naming_file_in_errors(path):
            yield partial
            _flush_to_disk(partial)
            os.replace(partial, path)
            _flush_to_disk(path.parent)
    except MemoryError:
        raise ValueError(f"{path}: this machine has too little memory to write it") from None
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary path at which the block creates a folder.

    When the block ends without an exception, that folder is renamed to `folder`; after an exception it is removed. If
    another process has made `folder` in the meantime, that one stays, since either will do.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partials(folder: Path, pattern: str = "*") -> None:
    """Remove the temporary files that killed processes left in `replacing`; nothing may be writing them now.

    Args:
        folder: the folder of the files.
        pattern: a pattern of the files' names, as glob takes it.
    """
    for partial in folder.glob(f".{pattern}.partial"):
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text, completely or not at all.

    Args:
        path: the file.
        text: its content, which is written in UTF-8.
        private: whether only the owner may read the file.
    """
    with replacing(path) as partial:
        if private:
            # A file that a crashed process left may have another mode. The new file is private from its first byte on,
            # whatever the umask.
            partial.unlink(missing_ok=True)
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, completely or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# How a text begins that a spreadsheet takes for a formula. It may take the full-width forms for the ASCII ones.
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def no_formula(cell: Any) -> Any:
    """Return a cell of a CSV file as a spreadsheet may read it.

    A text that a spreadsheet would take for a formula gets an apostrophe in front. Source: OWASP, CSV Injection.
    """
    if isinstance(cell, str) and cell.startswith(FORMULA_BEGINNINGS):
        return f"'{cell}"
    return cell


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with _reading(path), path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def hash_of_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return the SHA-256 of a value's canonical JSON, in hexadecimal.

    Args:
        value: the value.
        default: converts an object that JSON does not have into one that it has.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=default)
    return hashlib.sha256(text.encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    _check_kind(path)
    with _reading(path):
        return path.read_bytes()


def as_utf8(content: bytes) -> bytes:
    """Return the bytes of a text in UTF-8, without a byte order mark.

    Args:
        content: the bytes of a text in UTF-8, UTF-16 or UTF-32. PowerShell writes UTF-16 into files. Bytes that cannot
            be decoded are returned as they are.
    """
    encoding = json.detect_encoding(content)
    if encoding.startswith("utf-8"):
        return content.removeprefix(codecs.BOM_UTF8)
    try:
        # The incremental decoder accepts a last character of which a killed process wrote only a part.
        return codecs.getincrementaldecoder(encoding)().decode(content).encode()
    except UnicodeDecodeError:
        return content


def read_text(path: Path) -> str:
    """Return the content of a file in UTF-8 or UTF-16."""
    try:
        return as_utf8(read_bytes(path)).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error}); is it the right file?") from None


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file as bytes, each with its line end."""
    _check_kind(path)
    with _reading(path), path.open("rb") as file:
        yield from file


def file_names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; an empty list if there is no such folder.

    Raises:
        OSError: the folder cannot be read, or the path is no folder. pathlib's glob would ignore both.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def parse_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        content: the text.
        where: where the text is from, for the message.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); is the file complete?") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    return parse_json(read_bytes(path), str(path))


def read_json_object(
    path: Path, shape: Mapping[Any, Any] = EMPTY, remedy: str = "remove it, or create it again"
) -> dict[str, Any]:
    """Return the object in a JSON file, which must have a shape; see `check_shape`."""
    content = read_json(path)
    check_shape(path, content, shape, remedy)
    return content


def check_shape(
    path: Path | str, content: Any, shape: Mapping[Any, Any], remedy: str = "remove it, or create it again"
) -> None:
    """Raise ValueError if a value does not have a shape.

    Args:
        path: where the content is from, for the message.
        content: the value that is checked.
        shape: the shape of an object: from a key that the object must have to the shape of its value. That is a type,
            the shape of an object, or a list with the shape that every entry of the value must have. The key `str`
            stands for every key that is not named. Without it, further keys may have any value.
        remedy: what to do about a file without the shape.

    Raises:
        ValueError: the value does not have the shape; the message names the key.
    """
    difference = _find_difference(content, shape, "")
    if difference:
        raise ValueError(f"{path}: {difference}; {remedy}")


def _find_difference(value: Any, shape: Any, where: str) -> str | None:
    """Say where a value does not have a shape; None if it has the shape.

    Args:
        value: the value that is checked.
        shape: the shape, as for `check_shape`.
        where: the keys and indices that lead to the value, with dots between them; "" for the whole content.
    """
    kind = shape
    if isinstance(shape, Mapping):
        kind = dict
    elif isinstance(shape, list):
        kind = list
    if not isinstance(value, kind):
        return f"{where or 'it'} is {value!s:.60}, not of the type {getattr(kind, '__name__', kind)}"
    # The key or the index of each part of the value, the part, and the shape that it must have.
    parts: list[tuple[Any, Any, Any]] = []
    if isinstance(shape, Mapping):
        missing = [key for key in shape if key is not str and key not in value]
        if missing:
            return f"{where or 'it'} has no {', '.join(missing)}"
        shape_of_others = shape.get(str, object)
        parts = [(key, part, shape.get(key, shape_of_others)) for key, part in value.items()]
    elif isinstance(shape, list):
        parts = [(index, part, shape[0]) for index, part in enumerate(value)]
    for key, part, shape_of_part in parts:
        difference = _find_difference(part, shape_of_part, f"{where}.{key}".removeprefix("."))
        if difference:
            return difference
    return None


def read_config(path: Path) -> "DictConfig":
    """Return a configuration as Hydra writes it, not resolved."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = read_text(path)
    try:
        config = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML of keys and values ({error}); was it cut off?") from None
    # OmegaConf would take a bare word for a key.
    if not isinstance(config, DictConfig) or (":" not in text):
        raise ValueError(f"{path}: contains no keys and values; was it cut off?")
    return config


def read_whole_number(path: Path) -> int:
    """Return the number in a file that holds only a whole number, such as verl's file with the last checkpoint's step.

    The number has at most 18 digits and no sign.
    """
    text = read_bytes(path).decode(errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{path}: {text!r:.60} is not a whole number of at most 18 digits; was it cut off?")
    return int(text)


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Yield an open Parquet file.

    Errors of pyarrow, also those within the block, become a ValueError that names the file.
    """
    import pyarrow
    import pyarrow.parquet

    _check_kind(path)
    try:
        with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        # pyarrow raises an OSError without a number for pages that it cannot decompress.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: not a Parquet file, or cut off ({error}); is the copy complete?") from None


def read_table(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Return the table in a Parquet file.

    Args:
        path: the file.
        columns: the names of the columns that are read; None for all.

    Raises:
        ValueError: the file lacks one of the columns, or is not a Parquet file.
    """
    with parquet_file(path) as file:
        missing = [name for name in columns or () if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}, only {', '.join(file.schema_arrow.names)}")
        return file.read(columns)


def _check_kind(path: Path) -> None:
    """Raise ValueError if something is at a path that is no file."""
    # Opening a pipe would wait for a writer, and the error for a folder does not say what was expected.
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or pipe"
        raise ValueError(f"{path}: {kind}, not a file")


def _flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
