"""Logs besides verl's file log: TensorBoard's folders, CSV exports of W&B and its runs."""

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas

from verl_clipx.analysis.runs.console import read_console
from verl_clipx.analysis.runs.run_log import VERL_ONLY, Entry, Log, Rows, last_run, numbers_in
from verl_clipx.common.files import GZIP, as_utf8, read_bytes, read_text

EVENTS = "events.out.tfevents.*"

# The column of the step in a panel's export and in that of a run's history, and what W&B adds to a panel's columns.
STEP_COLUMNS = ("Step", "_step", "step", "training/global_step")
# Those that are no metric of verl's, if a table has several.
STEPS_ALONE = ("Step", "_step", "step")
ONE_RUN = "Name one as wandb://entity/project/run, with the run's ID, or export each by itself."
RANGE_COLUMN = re.compile(r"__(MIN|MAX)$")
# What pandas writes before the columns of a table, as it names it where it reads the table again.
INDEX_COLUMN = re.compile(r"Unnamed: \d+(\.\d+)*|index|level_0")
# Of a table of runs, as W&B's page and its API export it: a row a run. It names them, or has two other such columns.
NAME_COLUMN = "name"
TABLE_COLUMNS = frozenset({"id", "state", "created", "created_at", "runtime", "user", "sweep", "tags", "notes", "url"})


def is_of_wandb(path: Path) -> bool:
    """Returns whether a path is wandb://entity/project/run; in a path, two slashes are one."""
    return path.parts[:1] == ("wandb:",)


Reader = Callable[[Path], Log]
"""Reads a log."""


def reader_of(path: Path) -> Reader | None:
    """Returns the function that reads a log other than verl's file log; None for a file log, or if there is none."""
    if path.is_dir():
        if next(path.rglob(EVENTS), None) is not None:
            return read_tensorboard
        return read_exports if next(path.glob("*.csv"), None) is not None else None
    is_other = path.suffix not in (".jsonl", ".json") and path.is_file()
    if not is_other or (content := read_bytes(path)).startswith(GZIP):
        return None
    if path.suffix == ".csv":
        return read_exports
    # A console's output may begin with the configuration, as Python writes it.
    return None if re.match(rb"\s*{(?!')", as_utf8(content)) else read_console


def read_tensorboard(path: Path) -> Log:
    """Returns the scalars of a TensorBoard folder, that of one run, or one above it.

    Raises:
        ValueError: it has the events of several runs.
        ModuleNotFoundError: tensorboard, which comes with verl, is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    folders = sorted({file.parent for file in path.rglob(EVENTS)})
    if len(folders) > 1:
        names = ", ".join(str(one.relative_to(path)) for one in folders)
        raise ValueError(f"{path}: {len(folders)} runs ({names}). Name each by its folder.")
    events = EventAccumulator(str(folders[0]), size_guidance={SCALARS: 0}).Reload()
    scalars = [
        (one.wall_time, one.step, tag, one.value) for tag in events.Tags()[SCALARS] for one in events.Scalars(tag)
    ]
    steps = itertools.groupby(sorted(scalars), key=lambda scalar: scalar[1])
    rows = (Entry(step, {tag: float(value) for *_, tag, value in of_step}) for step, of_step in steps)
    return last_run(path, rows)


def read_exports(path: Path) -> Log:
    """Reads W&B's exports: the CSV files, or one, of a run's panels or of its history.

    Raises:
        ValueError: a file is no table, has no column of steps, those of several runs, or a row a run.
    """
    rows: Rows = {}
    runs: set[str] = set()
    words: dict[str, str] = {}
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        table, step_column = read_table(file)
        # A panel's columns are called `RUN - METRIC`.
        runs |= {name.rpartition(" - ")[0] for name in table if name not in STEP_COLUMNS} - {""}
        if len(runs) > 1:
            raise ValueError(f"{file}: {len(runs)} runs ({', '.join(sorted(runs))}). {ONE_RUN}")
        for row in table[table[step_column] != ""].to_dict("records"):
            step = step_in(file, row[step_column])
            texts = texts_by_metric(row, step_column)
            # An empty cell or a word is no value; NaN is one.
            values = numbers_in(texts)
            words |= {key: text for key, text in texts.items() if key not in values and text[0] in "+-.0123456789"}
            add_values(rows, step, values, file)
    for metric, text in words.items():
        warnings.warn(f"{path}: not a number, and ignored: {metric} {text!r:.60}", stacklevel=2)
    return Log(rows)


def read_table(file: Path) -> tuple[pandas.DataFrame, str]:
    """Reads a CSV file as texts, without the columns that pandas and W&B's ranges add, and the name of its step column.

    Raises:
        ValueError: it is no table, is W&B's table of runs, or has no column of steps.
    """
    text = read_text(file)
    # A spreadsheet saves with its own separator, and with a semicolon its own decimal mark, which may be a comma.
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
    if not abs(step) <= 2**53 or step % 1:
        raise ValueError(f"{file}: {text!r:.60} is not a training step.")
    return int(step)


def texts_by_metric(row: dict[str, str], step_column: str) -> dict[str, str]:
    """Returns the cells of a row that are not empty by their metrics, without those of steps."""
    texts = {}
    for name, text in row.items():
        if name not in (step_column, *STEPS_ALONE) and text.strip():
            texts[name.rpartition(" - ")[2]] = text.strip()
    return texts


def add_values(rows: Rows, step: int, values: dict[str, float], file: Path) -> None:
    """Adds values to those of their step; raises ValueError for a second value of a metric that differs."""
    known = rows.setdefault(step, {})
    for metric, value in known.items():
        if metric in values and str(values[metric]) != str(value):
            raise ValueError(
                f"{file}, step {step}: there is a second value of {metric}, so the file seems to hold several "
                f"runs. {ONE_RUN}"
            )
    known |= values


def is_table_of_runs(columns: Iterable[str]) -> bool:
    """Returns whether columns are those of W&B's table of runs."""
    names = {column.lower() for column in columns}
    return NAME_COLUMN in names or len(names & TABLE_COLUMNS) > 1


def read_wandb(path: Path) -> Log:
    """Returns the numbers of a run of W&B by step, all that it logged, and its name and configuration.

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
            # W&B adds keys that begin with _, and may give null for what it has not.
            own = {key: value for key, value in entry.items() if not (key.startswith("_") or value is None)}
            rows.setdefault(int(entry["_step"]), {}).update(numbers_in(own))
        configuration = dict(run.config)
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"wandb://{name}: {error}") from None
    return Log(rows, {"display_name": run.name, "configuration": configuration})
