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
from verl_clipx.analysis.runs.run_log import VERL_ONLY, Entry, Log, Rows, last_run, numbers_in
from verl_clipx.common.files import GZIP, as_utf8, read_bytes, read_text

EVENTS = "events.out.tfevents.*"

# Columns that have the step: the first in the export of a panel, the others in that of a run's history.
STEP_COLUMNS = ("Step", "_step", "step", "training/global_step")
# The columns among them that are never a metric, while training/global_step is one of verl's too.
STEPS_ALONE = ("Step", "_step", "step")
ONE_RUN = "Name one as wandb://entity/project/run, with the run's ID, or export each by itself."
# What W&B adds to a panel's columns: the range of a value.
RANGE_COLUMN = re.compile(r"__(MIN|MAX)$")
# The index that pandas writes before the columns of a table, by the names that it gives it when it reads the table.
INDEX_COLUMN = re.compile(r"Unnamed: \d+(\.\d+)*|index|level_0")
# W&B's page and its API export a table of runs, a row a run. It has this column, or two of the others.
NAME_COLUMN = "name"
TABLE_COLUMNS = frozenset({"id", "state", "created", "created_at", "runtime", "user", "sweep", "tags", "notes", "url"})


def is_of_wandb(path: Path) -> bool:
    """Returns whether a path is wandb://entity/project/run, of which `Path` keeps a single slash."""
    return path.parts[:1] == ("wandb:",)


class Scalar(NamedTuple):
    """A value that TensorBoard logged, and when."""

    time: float
    step: int
    metric: str
    value: float


Reader = Callable[[Path], Log]
"""Reads a log."""


def reader_of(path: Path) -> Reader | None:
    """Returns the function that reads a log other than verl's file log; None for a file log, or if there is none."""
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
    """Returns the scalars that TensorBoard's files of a run have.

    Args:
        path: the folder that they are in, or one above it.

    Raises:
        ValueError: several folders have such files, so that there are several runs.
        ModuleNotFoundError: tensorboard, which comes with verl, is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    folders = sorted({file.parent for file in path.rglob(EVENTS)})
    if len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise ValueError(f"{path}: {len(folders)} runs ({names}). Name each by its folder.")
    # A guidance of 0 keeps every value, where TensorBoard would draw some.
    events = EventAccumulator(str(folders[0]), size_guidance={SCALARS: 0}).Reload()
    scalars: list[Scalar] = []
    for metric in events.Tags()[SCALARS]:
        for event in events.Scalars(metric):
            scalars.append(Scalar(event.wall_time, event.step, metric, float(event.value)))
    # In the order in which they were logged: a resumed run repeats steps, of which `last_run` takes the later ones.
    scalars.sort()
    entries = [
        Entry(step, {scalar.metric: scalar.value for scalar in scalars_of_step})
        for step, scalars_of_step in itertools.groupby(scalars, key=lambda scalar: scalar.step)
    ]
    return last_run(path, entries)


def read_exports(path: Path) -> Log:
    """Reads W&B's exports of one run: its panels or its history, as CSV.

    A cell that is empty or a word is no value, and one that is `NaN` is. A text that begins as a number does but is
    none, such as 1,234.5, gives a warning, one for each metric.

    Args:
        path: a CSV file, or a folder whose CSV files are all read.

    Raises:
        ValueError: a file is no table, has no column of steps or a row a run; or the files are of several runs.
    """
    rows: Rows = {}
    runs: set[str] = set()
    unread: dict[str, str] = {}
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    for file in files:
        table, step_column = read_table(file)
        runs.update(runs_in(table))
        if len(runs) > 1:
            raise ValueError(f"{file}: {len(runs)} runs ({', '.join(sorted(runs))}). {ONE_RUN}")
        for row in table[table[step_column] != ""].to_dict("records"):
            step = step_in(file, row[step_column])
            texts = texts_by_metric(row, step_column)
            values = numbers_in(texts)
            add_values(rows, step, values, file)
            for metric, text in texts.items():
                if metric not in values and text[0] in "+-.0123456789":
                    unread[metric] = text
    for metric, text in unread.items():
        warnings.warn(f"{path}: not a number, and ignored: {metric} {repr(text)[:60]}", stacklevel=2)
    return Log(rows)


def runs_in(table: pandas.DataFrame) -> set[str]:
    """Returns the names of the runs in a panel's export, whose columns are called `RUN - METRIC`; none in a history."""
    metric_columns = [name for name in table if name not in STEP_COLUMNS]
    names = {name.rpartition(" - ")[0] for name in metric_columns}
    return names - {""}


def read_table(file: Path) -> tuple[pandas.DataFrame, str]:
    """Reads a CSV file.

    Returns:
        Its cells as texts, without the columns that pandas and W&B's ranges add; and the name of its step column.

    Raises:
        ValueError: it is no table, is W&B's table of runs, or has no column of steps.
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
    """Returns the step that a cell has; raises ValueError if it is no whole number."""
    step = numbers_in({"step": text}).get("step", math.nan)
    # Beyond this, float64 can't tell neighbouring steps apart; NaN is not below it either.
    if not abs(step) <= 2**53 or step % 1:
        raise ValueError(f"{file}: {text!r:.60} is not a training step.")
    return int(step)


def texts_by_metric(row: dict[str, str], step_column: str) -> dict[str, str]:
    """Returns the texts in a row of a table by their metrics, without empty ones and without the step."""
    texts = {}
    for name, text in row.items():
        if name not in (step_column, *STEPS_ALONE) and text.strip():
            texts[name.rpartition(" - ")[2]] = text.strip()
    return texts


def add_values(rows: Rows, step: int, values: dict[str, float], file: Path) -> None:
    """Adds values to those that a step has.

    Args:
        rows: what was read so far; changed in place.
        step: the step of the values.
        values: from a metric to its value.
        file: where they stand, for the message.

    Raises:
        ValueError: the step has another value of one of these metrics.
    """
    row = rows.setdefault(step, {})
    for metric, value in values.items():
        # NaN is the same as NaN here.
        if metric in row and repr(row[metric]) != repr(value):
            raise ValueError(
                f"{file}, step {step}: there is a second value of {metric}, so the file seems to hold several "
                f"runs. {ONE_RUN}"
            )
    row.update(values)


def is_table_of_runs(columns: Iterable[str]) -> bool:
    """Returns whether columns are those of W&B's table of runs."""
    names = {column.lower() for column in columns}
    return NAME_COLUMN in names or len(names & TABLE_COLUMNS) > 1


def read_wandb(path: Path) -> Log:
    """Asks W&B for a run: all the numbers that it logged, its name and its configuration.

    Args:
        path: wandb://entity/project/run.

    Raises:
        ValueError: the path has not three parts, or W&B refuses: it has no such run, or nobody is logged in.
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
