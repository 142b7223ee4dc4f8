"""verl's file log as a table."""

import gzip
import math
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from verl_clipx.common.files import GZIP, parse_json, read_bytes
from verl_clipx.runs import keys

Rows = dict[int, dict[str, float]]
"""Step to metric to number."""


@dataclass(frozen=True)
class SkippedUpdates:
    """Optimizer updates that verl left out, because their gradients were not finite.

    Args:
        first: the first step with one.
        steps: how many steps have one.
        trained: training steps from the first one on.
        updates: how many updates; None where the log only says in which steps.
    """

    first: int
    steps: int
    trained: int
    updates: int | None


def skipped_updates(log: pandas.DataFrame, not_finite: Mapping[str, list[int]]) -> SkippedUpdates | None:
    """The updates that a run skipped; None if it skipped none.

    Args:
        log: from `read_run_log`. If it has no count, because the plugin did not log one yet, the gradient norms that
            are not finite say in which steps.
        not_finite: from `not_finite_in`.
    """
    updates = None
    if keys.SKIPPED_UPDATES in log:
        counts = log[keys.SKIPPED_UPDATES]
        counts = counts[counts > 0]
        steps = list(counts.index)
        updates = round(total) if math.isfinite(total := float(counts.sum())) else None
    else:
        steps = not_finite.get(keys.GRADIENT_NORM, [])
    if not steps:
        return None
    return SkippedUpdates(int(steps[0]), len(steps), int((log.index >= steps[0]).sum()), updates)


def read_run_log(path: Path) -> pandas.DataFrame:
    """The log of a run as a table; see `read_rows`."""
    return table_of(read_rows(path)[0])


def read_rows(path: Path) -> tuple[Rows, dict[str, Any]]:
    """Reads the JSON lines of verl's file logger.

    Args:
        path: the file that VERL_FILE_LOGGER_PATH named, or a run that `clipx table fill` kept.

    Returns:
        The numbers by training step, and what a kept run says of itself in its first line, nothing for other logs. A
        step that was logged twice, as the first one is by the validation before training, is one. A last line that is
        not whole, such as a killed run leaves behind, is left out with a warning.

    Raises:
        FileNotFoundError: there is no such file: the run has not logged yet, or `file` is not in trainer.logger.
        ValueError: the file is empty or too large, has a whole line of something else, which the message names, or is
            compressed by gzip without being a kept run.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such log. Run with trainer.logger=[file] and VERL_FILE_LOGGER_PATH={path}."
        )
    header, text = _header_and_steps(path)
    if not text.strip():
        raise ValueError(f"{path}: empty: the run has not logged its first step yet.")
    whole = text[: text.rfind(b"\n") + 1]
    rest = text[len(whole) :]
    if whole.strip() and rest.strip() and not _is_entry(rest):
        warnings.warn(f"{path}: its last line is cut off and was left out: {_shown(rest)}", stacklevel=2)
        text = whole
    return _rows(text, path), header


def read_growing_rows(path: Path) -> Rows:
    """The same of a run that goes on or was killed, without a last line that is not whole; nothing without a file.

    Raises:
        ValueError: a whole line is of something else.
    """
    text = read_bytes(path) if path.exists() else b""
    return _rows(text[: text.rfind(b"\n") + 1], path)


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
        raise ValueError(
            f"{path}: a gzip file, but no run that `clipx table fill` kept. Unpack it and name the log that is in it."
        )
    return {}, text


def not_finite_in(rows: Rows) -> dict[str, list[int]]:
    """The steps, ascending, at which a metric was logged as a value that is not finite or as null, by metric."""
    found: dict[str, list[int]] = {}
    for step in sorted(rows):
        for key, value in rows[step].items():
            if not math.isfinite(value):
                found.setdefault(key, []).append(step)
    return found


def _entry(line: bytes) -> tuple[int, dict[str, Any]]:
    entry = parse_json(line, "")
    step = int(entry["step"])
    # Beyond this, float64 and with it the axis of every figure cannot tell neighbouring steps apart.
    if abs(step) > 2**53:
        raise ValueError(f"step {step}: too large.")
    return step, dict(entry["data"])


_NO_ENTRY = (ValueError, TypeError, KeyError, OverflowError)


def _is_entry(line: bytes) -> bool:
    try:
        _entry(line)
    except _NO_ENTRY:
        return False
    return True


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


def table_of(rows: Rows) -> pandas.DataFrame:
    """A log's numbers as a table: a row a step (index `step`), ascending, a column a metric."""
    table = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
    table.index.name = "step"
    return table


def with_entropy(log: pandas.DataFrame) -> pandas.DataFrame:
    """The log with `actor/entropy`; if verl logs only the entropy of the updates, that takes its place."""
    if keys.ENTROPY in log or keys.ENTROPY_OF_UPDATES not in log:
        return log
    return log.assign(**{keys.ENTROPY: log[keys.ENTROPY_OF_UPDATES]})


def _rows(text: bytes, path: Path) -> Rows:
    rows: Rows = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            step, data = _entry(line)
        except _NO_ENTRY:
            message = 'not a line {"step": …, "data": {…}} of verl\'s file logger'
            raise ValueError(f"{path}, line {number}: {message}: {_shown(line)}") from None
        numbers = {
            key: _number(value) for key, value in data.items() if value is None or isinstance(value, int | float)
        }
        rows.setdefault(step, {}).update(numbers)
    return rows


def _number(value: float | None) -> float:
    """A logged number: null is NaN, and a whole number beyond the range of float64 is infinite."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
