"""verl's file log: its lines, and their numbers as a table."""

import gzip
import itertools
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.common.files import EMPTY, GZIP, as_utf8, parse_json, read_bytes

Rows = dict[int, dict[str, float]]
"""From a step to its metrics, and from a metric to its number."""

# The largest number up to which float64 has every whole number.
LARGEST_STEP = 2**53
# What messages say of files that are no logs of verl's.
VERL_ONLY = "clipx reads verl's logs: its file, its console output, TensorBoard's folder, or W&B's run or export."


class LogEntry(NamedTuple):
    """What was logged at once in a step. A step may have several entries: its validation may be logged by itself.

    Args:
        step: the training step.
        data: from a metric to its value.
        process: the process that logged the entry, if the output of a console says it; otherwise empty.
        line: the line of verl's file log, with its end; empty for other logs.
        batch: the fingerprints of the step's rollout batch, as the plugin's log has them, even if they are damaged.
    """

    step: int
    data: dict[str, Any]
    process: str = ""
    line: bytes = b""
    batch: Any = EMPTY


def entries_in(content: bytes, path: Path) -> Iterator[LogEntry]:
    """Yield the entries of a log of verl's file logger.

    A line that is damaged is left out with a warning. So is one that is cut off, as when the run was killed.

    Args:
        content: the content of the file.
        path: the path of the file, for messages.

    Raises:
        ValueError: there are lines and none is an entry, so that this is no log of verl's.
    """
    damaged: list[tuple[str, str]] = []
    any_whole = False
    for number, line in enumerate(content.splitlines(), 1):
        try:
            fields = parse_json(line, "")
            step = int(fields["step"])
            data = dict(fields["data"])
            batch = fields.get("batch", EMPTY)
            # Figures have steps in float64, which cannot tell larger neighbouring numbers apart.
            if abs(step) > LARGEST_STEP or step != float(fields["step"]):
                raise OverflowError
        except (ValueError, TypeError, KeyError, OverflowError):
            damaged.append((f"{path}, line {number}", repr(line[:60].decode(errors="replace"))))
            continue
        any_whole = True
        yield LogEntry(step, data, line=line + b"\n", batch=batch)
    for where, shown in damaged:
        if not any_whole:
            raise ValueError(f'{where}: not a line {{"step": …, "data": {{…}}}} of verl\'s: {shown}. {VERL_ONLY}')
        warnings.warn(f"{where}: cut off or damaged, and ignored: {shown}", stacklevel=2)


class Log(NamedTuple):
    """What a log says of its last run.

    Args:
        rows: its numbers by step.
        header: what else the log says of the run, such as its configuration and its name; empty if nothing.
        batches: from a step to the fingerprints of its rollout batch; empty if the log has none.
    """

    rows: Rows
    header: Mapping[str, Any] = EMPTY
    batches: Mapping[int, Mapping[str, Any]] = EMPTY


def parse_rows(content: bytes, path: Path) -> Rows:
    """Return the numbers of the last run in a log of verl's file logger; raise as `entries_in` and `last_run` do."""
    return log_of(content, path).rows


def log_of(content: bytes, path: Path) -> Log:
    """Return the last run in a log of verl's file logger; raise as `entries_in` and `last_run` do."""
    entries = [entry._replace(data=numbers_in(entry.data)) for entry in entries_in(content, path)]
    return last_run(path, entries)


def last_run(path: Path, entries: Sequence[LogEntry]) -> Log:
    """Return the last run in a log.

    If the steps go back, a run was resumed: what it logged from there on takes the place of what it logged before. If
    they go back to the first step, another run began. Both give a warning.

    Args:
        path: the path of the log, for messages.
        entries: the entries in the order in which they were logged. Those of the same step are joined.

    Raises:
        ValueError: steps of several processes or runs alternate, so that no single run can be read.
    """
    rows: Rows = {}
    batches: dict[int, Mapping[str, Any]] = {}
    last_step = 0
    restarts: list[str] = []
    # A validation may come before the first step of a resumed run. So it waits for the next step that trains, and is of
    # the same run as that step.
    waiting: list[LogEntry] = []
    for entry in entries:
        waiting.append(entry)
        if _is_validation(entry):
            continue
        repeats_step = entry.step == last_step > 0 and not entry.data.keys().isdisjoint(rows[entry.step])
        if entry.step < last_step or repeats_step:
            restarts.append(_say_restart(path, last_step, entry.step))
            is_resumed = entry.step > 1
            rows = {step: row for step, row in rows.items() if is_resumed and step < entry.step}
            batches = {step: batch for step, batch in batches.items() if is_resumed and step < entry.step}
        _add_entries(rows, waiting)
        if entry.batch is not EMPTY:
            batches[entry.step] = entry.batch
        last_step = entry.step
        waiting = []
    _check_one_run(path, entries, len(restarts))
    for restart in restarts:
        warnings.warn(restart, stacklevel=2)
    _add_entries(rows, waiting)
    return Log(rows, batches=batches)


def _is_validation(entry: LogEntry) -> bool:
    """Return whether an entry has nothing but a validation's scores."""
    return all(key.startswith("val-") for key in entry.data)


def _add_entries(rows: Rows, entries: Iterable[LogEntry]) -> None:
    """Add the numbers of entries to those of their steps, in place."""
    for entry in entries:
        rows.setdefault(entry.step, {}).update(entry.data)


def _say_restart(path: Path, last_step: int, step: int) -> str:
    """Say that a log goes back from its last step to an earlier one, and which of its numbers count."""
    if step > 1:
        return (
            f"{path}: after step {last_step} it goes on, as a resumed run does, with step {step}. Later values count."
        )
    return f"{path}: after step {last_step} it begins anew with step {step}. Only the steps of the last run count."


def _check_one_run(path: Path, entries: Sequence[LogEntry], restarts: int) -> None:
    """Refuse a log in which the steps of several runs alternate.

    Args:
        path: the log, for the message.
        entries: as for `last_run`.
        restarts: how often the steps go back.
    """
    processes = [entry.process for entry in entries if entry.process]
    # Successive entries of one process are one turn of this process.
    turns = [process for process, _ in itertools.groupby(processes)]
    a_process_returns = len(turns) > len(set(turns))
    # A run that is resumed again and again logs more than two steps before it stops, on average.
    goes_back_often = restarts > 2 and 2 * restarts >= len(entries)
    if not (a_process_returns or goes_back_often):
        return
    names = f" of {' and '.join(dict.fromkeys(turns))}" if turns else ""
    raise ValueError(
        f"{path}: steps{names} alternate, so several runs wrote this log. Put the lines of each run into a file of "
        "their own."
    )


def numbers_in(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among a step's values, without tables, pictures and words.

    A text that is a number counts as one, null as NaN, and a whole number beyond the range of float64 as infinite.
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
    """Read a log of verl's file logger, or a kept run.

    A kept run is a file in which the log follows a first line that says what the run was, among others the commit that
    made it. It may be compressed by gzip.

    Returns:
        The last run in the log. Its header is the first line of a kept run.

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
        raise ValueError(f"{path}: a gzip file, but not a kept run. Unpack it, and name the log that is in it.")
    log_lines = further_lines if header else content
    if not log_lines.strip():
        raise ValueError(f"{path}: empty: the run has not logged its first step yet.")
    return log_of(log_lines, path)._replace(header=header)


def header_of_kept_run(line: bytes) -> dict[str, Any]:
    """Return what the first line of a kept run says of it; empty if the line is a step, or anything else."""
    try:
        header = parse_json(line, "")
    except ValueError:
        return {}
    is_of_kept_run = isinstance(header, dict) and "commit" in header and "step" not in header
    return header if is_of_kept_run else {}


def read_run_log(path: Path) -> pandas.DataFrame:
    """Return the log of a run as a table; see `read_log`."""
    return table_of(read_log(path).rows)


def table_of(rows: Rows) -> pandas.DataFrame:
    """Return a log's numbers as a table: a row for each step (index `step`), ascending, a column for each metric."""
    return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")


def not_finite_in(rows: Rows) -> dict[str, list[int]]:
    """Return, for each metric that was logged as null or as a value that is not finite, these steps, ascending."""
    steps: dict[str, list[int]] = {}
    for step in sorted(rows):
        for key, value in rows[step].items():
            if not math.isfinite(value):
                steps.setdefault(key, []).append(step)
    return steps


def with_entropy(log: pandas.DataFrame) -> pandas.DataFrame:
    """Return the log with `actor/entropy`: if it has only the entropy of the updates, that is taken."""
    if keys.ENTROPY in log or keys.ENTROPY_OF_UPDATES not in log:
        return log
    return log.assign(**{keys.ENTROPY: log[keys.ENTROPY_OF_UPDATES]})
