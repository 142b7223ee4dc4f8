"""verl's file log: its lines, and their numbers as a table."""

import gzip
import math
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from verl_clipx.common.files import GZIP, parse_json, read_bytes
from verl_clipx.runs import keys

Rows = dict[int, dict[str, float]]
"""Step to metric to number."""


class Entry(NamedTuple):
    """A line of verl's file log.

    Args:
        line: as it stands there, with its end.
        data: metric to value.
    """

    line: bytes
    step: int
    data: dict[str, Any]


def entries_in(text: bytes, path: Path) -> Iterator[Entry]:
    """The entries of a log; a line that is cut off, as a kill leaves it, or damaged is left out with a warning.

    Args:
        text: what the log holds.
        path: the log, for messages.

    Raises:
        ValueError: there are lines and none is an entry, so that this is no log of verl's.
    """
    damaged: list[tuple[int, bytes]] = []
    any_whole = False
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = parse_json(line, "")
            step, data = int(content["step"]), dict(content["data"])
        except (ValueError, TypeError, KeyError, OverflowError):
            damaged.append((number, line))
            continue
        # Beyond this, float64 and with it the axis of every figure can't tell neighbouring steps apart.
        if abs(step) > 2**53:
            damaged.append((number, line))
            continue
        any_whole = True
        yield Entry(line + b"\n", step, data)
    if damaged and not any_whole:
        number, line = damaged[0]
        raise ValueError(f'{path}, line {number}: not a line {{"step": …, "data": {{…}}}} of verl\'s: {_shown(line)}')
    for number, line in damaged:
        warnings.warn(f"{path}, line {number}: cut off or damaged, and left out: {_shown(line)}", stacklevel=2)


def rows_of(text: bytes, path: Path) -> Rows:
    """The numbers of a log by step; a step that was logged twice, as by the validation before training, is one.

    Args:
        text, path: as for `entries_in`.
    """
    rows: Rows = {}
    for entry in entries_in(text, path):
        numbers = {key: _number(value) for key, value in entry.data.items() if _is_number(value)}
        rows.setdefault(entry.step, {}).update(numbers)
    return rows


def read_rows(path: Path) -> tuple[Rows, dict[str, Any]]:
    """Reads the JSON lines of verl's file logger.

    Args:
        path: the file that VERL_FILE_LOGGER_PATH named, or a run that `keep_run` kept.

    Returns:
        The numbers by training step, and what a kept run says of itself in its first line, nothing for other logs.

    Raises:
        FileNotFoundError: there is no such file: the run has not logged yet, or `file` is not in trainer.logger.
        ValueError: the file is empty, has no line of verl's, or is compressed by gzip without being a kept run.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such log. Run with trainer.logger=[file] and VERL_FILE_LOGGER_PATH={path}."
        )
    header, text = _header_and_steps(path)
    if not text.strip():
        raise ValueError(f"{path}: empty: the run has not logged its first step yet.")
    return rows_of(text, path), header


def read_run_log(path: Path) -> pandas.DataFrame:
    """The log of a run as a table; see `read_rows`."""
    return table_of(read_rows(path)[0])


def _header_and_steps(path: Path) -> tuple[dict[str, Any], bytes]:
    text = read_bytes(path)
    compressed = text.startswith(GZIP)
    if compressed:
        try:
            text = gzip.decompress(text)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: a gzip file that cannot be unpacked ({error}).") from None
    first, _, steps = text.partition(b"\n")
    try:
        header = parse_json(first, "")
    except ValueError:
        header = None
    if isinstance(header, dict) and "commit" in header and "step" not in header:
        return header, steps
    if compressed:
        raise ValueError(f"{path}: a gzip file, but no kept run. Unpack it and name the log that is in it.")
    return {}, text


def table_of(rows: Rows) -> pandas.DataFrame:
    """A log's numbers as a table: a row a step (index `step`), ascending, a column a metric."""
    table = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
    table.index.name = "step"
    return table


def not_finite_in(rows: Rows) -> dict[str, list[int]]:
    """The steps, ascending, at which a metric was logged as a value that is not finite or as null, by metric."""
    steps: dict[str, list[int]] = {}
    for step in sorted(rows):
        for key, value in rows[step].items():
            if not math.isfinite(value):
                steps.setdefault(key, []).append(step)
    return steps


def with_entropy(log: pandas.DataFrame) -> pandas.DataFrame:
    """The log with `actor/entropy`; if verl logs only the entropy of the updates, that takes its place."""
    if keys.ENTROPY in log or keys.ENTROPY_OF_UPDATES not in log:
        return log
    return log.assign(**{keys.ENTROPY: log[keys.ENTROPY_OF_UPDATES]})


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _number(value: float | None) -> float:
    """A logged number: null is NaN, and a whole number beyond the range of float64 is infinite."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))
