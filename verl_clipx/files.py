"""Files that appear whole or not at all, and JSON of bounded size whose errors name it."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 256 << 20
"""Largest JSON file read; the results of an evaluation have a few megabytes."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path`, on the disk, when the block ends without an exception.

    Args:
        path: the file; its folder is made if missing. After a crash it is the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        _reach_the_disk(partial)
        os.replace(partial, path)
        _reach_the_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it cannot be read, a folder for instance.
        ValueError: it is larger than `MAX_JSON_BYTES` or no JSON; names the file.
    """
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {MAX_JSON_BYTES} bytes; is it the right file?")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); remove it, or make it anew") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError, ValueError: as `read_json`; or it holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds {type(content).__name__}, not an object; remove it, or make it anew")
    return content


def _reach_the_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
