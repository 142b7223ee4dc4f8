"""Logs besides verl's file log: TensorBoard's folders, CSV exports of W&B and its runs."""

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pandas

from verl_clipx.analysis.runs.console import read_console
from verl_clipx.analysis.runs.run_log import LARGEST_STEP, VERL_ONLY, Log, LogEntry, Rows, last_run, numbers_in
from verl_clipx.common.files import GZIP, as_utf8, read_bytes, read_text

EVENTS = "events.out.tfevents.*"

# The names of the step's column: the first one is that of an exported panel, the others are those of a run's history.
STEP_COLUMNS = ("Step", "_step", "step", "training/global_step")
# The step's columns that are never a metric. verl logs training/global_step as a metric too.
NEVER_METRICS = ("Step", "_step", "step")
NAME_ONE_RUN = "Name one as wandb://entity/project/run, with the run's ID, or export each by itself."
# W&B adds columns with the range of a value to an exported panel. Their names end like this.
RANGE_COLUMN = re.compile(r"__(MIN|MAX)$")
# The names of the columns in which pandas keeps the index of a table that it wrote and read again.
INDEX_COLUMN = re.compile(r"Unnamed: \d+(\.\d+)*|index|level_0")
# W&B's page and its API also export a table of runs, with one row for each run. It has the column `name`, or at least
# two of TABLE_COLUMNS.
NAME_COLUMN = "name"
TABLE_COLUMNS = frozenset({"id", "state", "created", "created_at", "runtime", "user", "sweep", "tags", "notes", "url"})


def is_of_wandb(path: Path) -> bool:
    """Return whether a path is wandb://entity/project/run. `Path` makes a single slash of the two."""
    return path.parts[:1] == ("wandb:",)


class Scalar(NamedTuple):
    """A value that TensorBoard logged. Scalars sort by time.

    Args:
        time: when it was logged, in seconds since 1970.
        step: the training step.
        metric: the metric's key.
        value: the value.
    """

    time: float
    step: int
    metric: str
    value: float


Reader = Callable[[Path], Log]
"""A function that reads the log at a path."""


def reader_of(path: Path) -> Reader | None:
    """Return the function that reads a log other than verl's file log.

    It is None for verl's file log, and if the path has no log.
    """
    if path.is_dir():
        if any(path.rglob(EVENTS)):
            return read_tensorboard
        if any(path.glob("*.csv")):
            return read_exports
        return None
    if path.suffix in (".jsonl", ".json") or not path.is_file():
        return None
    content = read_bytes(path)
    if content.startswith(GZIP):
        return None
    if path.suffix == ".csv":
        return read_exports
    # A line of verl's file log begins with a brace. So may a console's output, but with the configuration as Python
    # writes it, whose keys are in single quotes.
    is_file_log = re.match(rb"\s*{(?!')", as_utf8(content))
    return None if is_file_log else read_console


def read_tensorboard(path: Path) -> Log:
    """Read the scalars in TensorBoard's event files of one run.

    Where a resumed run repeats steps, the later values count; see `last_run`.

    Args:
        path: the folder of the event files, or a folder above it.

    Raises:
        ValueError: more than one folder has event files, so there are several runs, or the steps in one folder are of
            several runs.
        ModuleNotFoundError: tensorboard, which comes with verl, is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    folders = sorted({file.parent for file in path.rglob(EVENTS)})
    if len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise ValueError(f"{path}: {len(folders)} runs ({names}). Name each by its folder.")
    # 0 keeps all values. By default TensorBoard keeps a random sample of them.
    events = EventAccumulator(str(folders[0]), size_guidance={SCALARS: 0}).Reload()
    scalars: list[Scalar] = []
    for metric in events.Tags()[SCALARS]:
        for event in events.Scalars(metric):
            scalar = Scalar(time=event.wall_time, step=event.step, metric=metric, value=float(event.value))
            scalars.append(scalar)
    # `last_run` expects the order in which the values were logged, since a resumed run repeats steps. groupby joins
    # only neighbours, so that a repeated step remains an entry of its own.
    scalars.sort()
    entries: list[LogEntry] = []
    for step, scalars_of_step in itertools.groupby(scalars, key=lambda scalar: scalar.step):
        values = {scalar.metric: scalar.value for scalar in scalars_of_step}
        entries.append(LogEntry(step=step, data=values))
    return last_run(path, entries)


# A number begins with one of these. So does one with a thousands separator or a decimal comma, which can't be read.
BEGINNINGS_OF_NUMBERS = "+-.0123456789"


def read_exports(path: Path) -> Log:
    """Read W&B's exports of one run, as CSV: exported line panels, or the run's exported history.

    Empty cells and words are ignored, and so are rows without a step. `NaN` is a value. A text that only begins like a
    number, such as 1,234.5, is ignored too, with one warning for each metric.

    Args:
        path: a CSV file, or a folder whose CSV files are all read.

    Raises:
        ValueError: a file is not a table, has no step column, or is W&B's table of runs; a step is not a whole number;
            a step has two values of one metric; or the panels' columns name several runs.
    """
    rows: Rows = {}
    runs: set[str] = set()
    texts_like_numbers: dict[str, str] = {}
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    for file in files:
        table, step_column = read_table(file)
        runs.update(runs_in(table))
        if len(runs) > 1:
            raise ValueError(f"{file}: {len(runs)} runs ({', '.join(sorted(runs))}). {NAME_ONE_RUN}")
        rows_with_step = table[table[step_column] != ""]
        for row in rows_with_step.to_dict("records"):
            step = step_in(file, row[step_column])
            texts = texts_by_metric(row, step_column)
            values = numbers_in(texts)
            add_values(rows, step, values, file)
            for metric, text in texts.items():
                if metric not in values and text[0] in BEGINNINGS_OF_NUMBERS:
                    texts_like_numbers[metric] = text
    for metric, text in texts_like_numbers.items():
        warnings.warn(f"{path}: {metric} is {text!r:.60}, which is not a number; ignored.", stacklevel=2)
    return Log(rows)


def runs_in(table: pandas.DataFrame) -> set[str]:
    """Return the names of the runs in an exported panel, whose columns are called `RUN - METRIC`.

    It is empty for a history, whose columns are called as the metrics.
    """
    metric_columns = [name for name in table if name not in STEP_COLUMNS]
    names = {name.rpartition(" - ")[0] for name in metric_columns}
    return names - {""}


def read_table(file: Path) -> tuple[pandas.DataFrame, str]:
    """Read a CSV file.

    Returns:
        The table's cells as texts, without the columns of pandas's index and of W&B's ranges; and the name of the
        table's step column.

    Raises:
        ValueError: the file is not a table, is W&B's table of runs, or has no step column.
    """
    text = read_text(file)
    # A spreadsheet may save with another separator. Where that is a semicolon, its decimal mark may be a comma.
    separator = max(",;\t", key=text.partition("\n")[0].count)
    try:
        table = pandas.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, index_col=False)
    except ValueError as error:
        raise ValueError(f"{file}: not a table that W&B exports ({error}). {VERL_ONLY}") from None
    if is_table_of_runs(table.columns):
        raise ValueError(
            f"{file}: this is W&B's table of runs, which has one row for each run and no steps. Name a run as "
            "wandb://entity/project/run, with the run's ID, or export its line panels or `run.history()` as CSV."
        )
    columns = [name for name in table if not (RANGE_COLUMN.search(name) or INDEX_COLUMN.fullmatch(name))]
    step_column = next((name for name in STEP_COLUMNS if name in columns), None)
    if step_column is None:
        raise ValueError(
            f"{file}: no column {' or '.join(STEP_COLUMNS[:2])}. In W&B export a line panel as CSV, or save "
            f"`run.history()` of its API. {VERL_ONLY}"
        )
    if separator == ";":
        table = table.apply(lambda column: column.str.replace(",", "."))
    return table[columns], step_column


def step_in(file: Path, text: str) -> int:
    """Return the step in a cell; raise ValueError, which names the file, if the cell has no whole number."""
    step = numbers_in({"step": text}).get("step", math.nan)
    # For NaN the comparison is False.
    if not abs(step) <= LARGEST_STEP or step % 1:
        raise ValueError(f"{file}: {text!r:.60} is not a training step.")
    return int(step)


def texts_by_metric(row: dict[str, str], step_column: str) -> dict[str, str]:
    """Return the texts in a row of a table, from the metric to the text, without empty texts and without the step."""
    texts = {}
    for name, text in row.items():
        if name not in (step_column, *NEVER_METRICS) and text.strip():
            # A panel's column is called `RUN - METRIC`.
            metric = name.rpartition(" - ")[2]
            texts[metric] = text.strip()
    return texts


def add_values(rows: Rows, step: int, values: dict[str, float], file: Path) -> None:
    """Add a step's values to those that were read so far.

    Args:
        rows: what was read so far; changed in place.
        step: the step of the values.
        values: from a metric to its value.
        file: the file that has the values, for the message.

    Raises:
        ValueError: the step already has another value of one of these metrics.
    """
    row = rows.setdefault(step, {})
    for metric, value in values.items():
        # By their texts, NaN equals NaN.
        if metric in row and repr(row[metric]) != repr(value):
            raise ValueError(
                f"{file}, step {step}: there is a second value of {metric}, so the file seems to hold several "
                f"runs. {NAME_ONE_RUN}"
            )
    row.update(values)


def is_table_of_runs(columns: Iterable[str]) -> bool:
    """Return whether the names of a table's columns are those of W&B's table of runs."""
    names = {column.lower() for column in columns}
    return NAME_COLUMN in names or len(names & TABLE_COLUMNS) > 1


def read_wandb(path: Path) -> Log:
    """Read a run from W&B's server: all numbers that it logged, its name and its configuration.

    Args:
        path: wandb://entity/project/run.

    Raises:
        ValueError: the path does not have three parts after wandb://, W&B has no such run, or nobody is logged in.
        ModuleNotFoundError: wandb, which comes with verl, is not installed.
    """
    name = "/".join(path.parts[1:])
    if len(path.parts) != 4:
        raise ValueError(f"wandb://{name}: write it as wandb://entity/project/run, where run is the run's ID.")
    import wandb

    rows: Rows = {}
    try:
        run = wandb.Api().run(name)
        for entry in run.scan_history():
            # W&B adds keys that begin with _, and may give null for a metric that the step does not have.
            logged = {key: value for key, value in entry.items() if not (key.startswith("_") or value is None)}
            rows.setdefault(int(entry["_step"]), {}).update(numbers_in(logged))
        configuration = dict(run.config)
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"wandb://{name}: {error}") from None
    return Log(rows, {"display_name": run.name, "configuration": configuration})
