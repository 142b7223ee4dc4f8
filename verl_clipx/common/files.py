"""A user's files: they are written completely or not at all, and named in errors.

Reading raises OSError if a file is not there or cannot be read, and ValueError if it is no file or not of the expected
kind.
"""

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
def _naming(path: Path) -> Iterator[None]:
    """Gives an error within the block the file's name: that of a full disk or of a failed read has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except MemoryError:
        raise ValueError(f"{path}: larger than this machine's memory; is it the right file?") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name to write to; the file becomes `path`, and is on the disk, when the block ends without an exception.

    Its folder is made if missing. After a crash it is the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written, for instance because it is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with _naming(path):
            yield partial
            _reach_the_disk(partial)
            os.replace(partial, path)
            _reach_the_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `folder` when the block ends without an exception, and is removed after one.

    If another process has made the same folder in the meantime, that one stays: either will do.
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
    """Removes what killed processes left of files that `replacing` was to make; nothing may be writing them now."""
    for partial in folder.glob(f".{pattern}.partial"):
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a text, whole or not at all; a private one may be read by nobody but its owner."""
    with replacing(path) as partial:
        if private:
            # It has this mode from its first byte on, whatever the umask; one that a crashed process left may not.
            partial.unlink(missing_ok=True)
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# The full-width forms too, which a spreadsheet may take for the ASCII ones.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def no_formula(cell: Any) -> Any:
    """Returns a cell of a CSV file; what a spreadsheet would take for a formula gets an apostrophe in front (OWASP)."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def hash_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with _naming(path), path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def hash_of_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Returns the SHA-256 of a value's canonical JSON, in hexadecimal; `default` converts what JSON does not have."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=default)
    return hashlib.sha256(text.encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Reads a file."""
    _check_kind(path)
    with _naming(path):
        return path.read_bytes()


def as_utf8(content: bytes) -> bytes:
    """Returns a text's bytes in UTF-8 without a mark in front, also of UTF-16, which PowerShell writes into files."""
    encoding = json.detect_encoding(content)
    if encoding.startswith("utf-8"):
        return content.removeprefix(codecs.BOM_UTF8)
    try:
        # A kill may have cut the last sign in two.
        return codecs.getincrementaldecoder(encoding)().decode(content).encode()
    except UnicodeDecodeError:
        return content


def read_text(path: Path) -> str:
    """Reads a text in UTF-8 or UTF-16."""
    try:
        return as_utf8(read_bytes(path)).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error}); is it the right file?") from None


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, each with its end."""
    _check_kind(path)
    with _naming(path), path.open("rb") as file:
        yield from file


def file_names_in(folder: Path) -> list[str]:
    """Returns the names in a folder, sorted; none if there is no such folder.

    Raises:
        OSError: it cannot be read, or is no folder; pathlib's glob would ignore both.
    """
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def parse_json(content: str | bytes, where: str) -> Any:
    """Returns a JSON text's value."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); is the file complete?") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return parse_json(read_bytes(path), str(path))


def read_json_object(
    path: Path, shape: Mapping[Any, Any] = EMPTY, remedy: str = "remove it, or create it again"
) -> dict[str, Any]:
    """Reads a JSON file that holds an object of a shape; see `check_shape`."""
    content = read_json(path)
    check_shape(path, content, shape, remedy)
    return content


def check_shape(
    path: Path | str, content: Any, shape: Mapping[Any, Any], remedy: str = "remove it, or create it again"
) -> None:
    """Refuses what is not of a shape.

    Args:
        path: where the content is from, for the message.
        content: what is checked.
        shape: what the object must have: by key a type, the shape of an object, or a list of the one shape that its
            entries have; under the key `str`, that of every value. Further keys are free.
        remedy: what to do about a file that is not of the shape.

    Raises:
        ValueError: it is not; names the key.
    """
    misfit = _misfit(content, shape, "")
    if misfit:
        raise ValueError(f"{path}: {misfit}; {remedy}")


def _misfit(value: Any, shape: Any, where: str) -> str | None:
    """Says where a value is not of a shape; None if it is."""
    kind = shape
    if isinstance(shape, Mapping):
        kind = dict
    elif isinstance(shape, list):
        kind = list
    if not isinstance(value, kind):
        return f"{where or 'it'} is {value!s:.60}, not of the type {getattr(kind, '__name__', kind)}"
    parts: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(shape, Mapping):
        missing = [key for key in shape if key is not str and key not in value]
        if missing:
            return f"{where or 'it'} has no {', '.join(missing)}"
        parts = ((key, value[key], shape.get(key, shape.get(str, object))) for key in value)
    elif isinstance(shape, list):
        parts = ((index, part, shape[0]) for index, part in enumerate(value))
    misfits = (_misfit(part, inner, f"{where}.{key}".removeprefix(".")) for key, part, inner in parts)
    return next(filter(None, misfits), None)


def read_config(path: Path) -> "DictConfig":
    """Reads a configuration as Hydra writes it, not resolved."""
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
    """Reads a file that holds only one whole number, such as verl's file with the last checkpoint's step."""
    text = read_bytes(path).decode(errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{path}: {text!r:.60} is not a whole number of at most 18 digits; was it cut off?")
    return int(text)


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Yields an open Parquet file; errors of pyarrow within the block become ValueError too."""
    import pyarrow
    import pyarrow.parquet

    _check_kind(path)
    try:
        with _naming(path), pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file, or cut off ({error}); is the copy complete?") from None


def read_table(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Reads a Parquet file."""
    with parquet_file(path) as file:
        missing = [name for name in columns or () if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}, only {', '.join(file.schema_arrow.names)}")
        return file.read(columns)


def _check_kind(path: Path) -> None:
    """Raises ValueError if a path is there and is no file."""
    # Opening a pipe would wait for a writer, and the error for a folder does not say what was expected.
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or pipe"
        raise ValueError(f"{path}: {kind}, not a file")


def _reach_the_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
