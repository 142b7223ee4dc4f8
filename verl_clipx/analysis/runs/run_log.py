"""verl's file log: its lines, and their numbers as a table."""

import gzip
import itertools
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.common.files import EMPTY, GZIP, as_utf8, parse_json, read_bytes

Rows = dict[int, dict[str, float]]
"""Step to metric to number."""


VERL_ONLY = "clipx reads verl's logs: its file, its console output, TensorBoard's folder, or W&B's run or export."


class Entry(NamedTuple):
    """The part of a step that was logged at once: metric to value.

    Of a console's output `process` is the one that logged it, if the log says it; of verl's file log `line` is the line
    with its end, and `batch` what the plugin's log adds: the fingerprints of the step's rollout batch, as they are
    written, be they damaged.
    """

    step: int
    data: dict[str, Any]
    process: str = ""
    line: bytes = b""
    batch: Any = EMPTY


def entries_in(content: bytes, path: Path) -> Iterator[Entry]:
    """Yields the entries of a log; a line that is cut off, as a kill leaves it, or damaged is left out with a warning.

    Raises:
        ValueError: there are lines and none is an entry, so that this is no log of verl's.
    """
    damaged = []
    any_whole = False
    for number, line in enumerate(content.splitlines(), 1):
        try:
            fields = parse_json(line, "")
            step = int(fields["step"])
            data = dict(fields["data"])
            batch = fields.get("batch", EMPTY)
            # Beyond this, float64 and with it the axis of every figure can't tell neighbouring steps apart.
            if abs(step) > 2**53 or step != float(fields["step"]):
                raise OverflowError
        except (ValueError, TypeError, KeyError, OverflowError):
            damaged.append((f"{path}, line {number}", repr(line[:60].decode(errors="replace"))))
            continue
        any_whole = True
        yield Entry(step, data, line=line + b"\n", batch=batch)
    for where, shown in damaged:
        if not any_whole:
            raise ValueError(f'{where}: not a line {{"step": …, "data": {{…}}}} of verl\'s: {shown}. {VERL_ONLY}')
        warnings.warn(f"{where}: cut off or damaged, and ignored: {shown}", stacklevel=2)


class Log(NamedTuple):
    """What a log says of its last run.

    Args:
        rows: the numbers by step.
        header: what the log says of the run besides: its configuration, its name.
        batches: step to the fingerprints of its rollout batch, as the plugin's log has them.
    """

    rows: Rows
    header: Mapping[str, Any] = EMPTY
    batches: Mapping[int, Mapping[str, Any]] = EMPTY


def rows_of(content: bytes, path: Path) -> Rows:
    """Returns the numbers of a log's last run, as for `entries_in` and `last_run`."""
    return log_of(content, path).rows


def log_of(content: bytes, path: Path) -> Log:
    """Returns what a log of verl's file logger says of its last run, as for `entries_in` and `last_run`."""
    return last_run(path, (entry._replace(data=numbers_in(entry.data)) for entry in entries_in(content, path)))


def last_run(path: Path, logged: Iterable[Entry]) -> Log:
    """Returns the last run in a log; a step that was logged in parts, as by a validation, is one.

    Where the steps go back, a run was resumed, and what it logged since counts; where they go back to the first, it is
    another run. Both give a warning.

    Raises:
        ValueError: steps of several processes or runs alternate, so that no run can be told.
    """
    rows: Rows = {}
    batches: dict[int, Mapping[str, Any]] = {}
    logged = list(logged)
    last = 0
    said = []
    ahead = []
    turns = [process for process, _ in itertools.groupby(one.process for one in logged if one.process)]
    for step, metrics, _, _, batch in logged:
        ahead.append((step, metrics))
        # A validation may be of an earlier checkpoint; the next step that trains says what it belongs to.
        if all(key.startswith("val-") for key in metrics):
            continue
        if step < last or (step == last > 0 and metrics.keys() & rows[step].keys()):
            rows = {at: row for at, row in rows.items() if step > 1 and at < step}
            batches = {at: before for at, before in batches.items() if step > 1 and at < step}
            resumed = "goes on, as a resumed run does: its later values"
            how = resumed if step > 1 else "begins anew: the last run's steps"
            said.append(f"{path}: after step {last} it {how} count, from step {step} on.")
        for at, values in ahead:
            rows.setdefault(at, {}).update(values)
        if batch is not EMPTY:
            batches[step] = batch
        last = step
        ahead = []
    if len(turns) > len({*turns}) or (len(said) > 2 and 2 * len(said) >= len(logged)):
        names = f" of {' and '.join(dict.fromkeys(turns))}" if turns else ""
        raise ValueError(
            f"{path}: steps{names} alternate, so several runs wrote this log. Put the lines of each run into a "
            "file of their own."
        )
    for what in said:
        warnings.warn(what, stacklevel=2)
    for at, values in ahead:
        rows.setdefault(at, {}).update(values)
    return Log(rows, batches=batches)


def numbers_in(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns a step's numbers, also those that are texts, among tables, pictures and words.

    Null is NaN, and a whole number beyond the range of float64 is infinite.
    """
    numbers = {}
    for key, value in data.items():
        try:
            numbers[key] = math.nan if value is None else float(value)
        except OverflowError:
            numbers[key] = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            continue
    return numbers


def read_log(path: Path) -> Log:
    """Reads the JSON lines of verl's file logger, or of a kept run.

    A kept run is one file, which may be compressed by gzip: its first line says what the run was, among others the
    commit that made it, and the lines of its log follow.

    Returns:
        The last run in it; its header is the first line of a kept run, and empty for other logs.

    Raises:
        FileNotFoundError: there is no such file: the run has not logged yet, or `file` is not in trainer.logger.
        ValueError: the file is empty, has no line of verl's, or is compressed by gzip without being a kept run.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such log. Run with trainer.logger=[file] and VERL_FILE_LOGGER_PATH={path}."
        )
    content = as_utf8(read_bytes(path))
    is_compressed = content.startswith(GZIP)
    if is_compressed:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: a gzip file that cannot be unpacked ({error}).") from None
    first_line, _, further_lines = content.partition(b"\n")
    header = header_of_kept_run(first_line)
    if is_compressed and not header:
        raise ValueError(f"{path}: a gzip file, but not an archived run. Unpack it, and name the log that is in it.")
    logged = further_lines if header else content
    if not logged.strip():
        raise ValueError(f"{path}: empty: the run has not logged its first step yet.")
    return log_of(logged, path)._replace(header=header)


def header_of_kept_run(line: bytes) -> dict[str, Any]:
    """Returns what the first line of a kept run says of it; empty if the line is a step, or anything else."""
    try:
        header = parse_json(line, "")
    except ValueError:
        return {}
    is_kept = isinstance(header, dict) and "commit" in header and "step" not in header
    return header if is_kept else {}


def read_run_log(path: Path) -> pandas.DataFrame:
    """Returns the log of a run as a table; see `read_log`."""
    return table_of(read_log(path).rows)


def table_of(rows: Rows) -> pandas.DataFrame:
    """Returns a log's numbers as a table: a row a step (index `step`), ascending, a column a metric."""
    return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")


def not_finite_in(rows: Rows) -> dict[str, list[int]]:
    """Returns by metric the steps, ascending, at which it was logged as null or as a value that is not finite."""
    steps: dict[str, list[int]] = {}
    for step in sorted(rows):
        for key, value in rows[step].items():
            if not math.isfinite(value):
                steps.setdefault(key, []).append(step)
    return steps


def with_entropy(log: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the log with `actor/entropy`; if verl logs only the entropy of the updates, that takes its place."""
    if keys.ENTROPY in log or keys.ENTROPY_OF_UPDATES not in log:
        return log
    return log.assign(**{keys.ENTROPY: log[keys.ENTROPY_OF_UPDATES]})
