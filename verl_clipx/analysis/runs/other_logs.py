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
    rows, runs, words = {}, set(), {}
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        text = read_text(file)
        # A spreadsheet saves with its own separator, and with a semicolon its own decimal mark, which may be a comma.
        separator = max(",;\t", key=text.partition("\n")[0].count)
        try:
            table = pandas.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, index_col=False)
        except ValueError as error:
            raise ValueError(f"{file}: no table that W&B exports ({error}). {VERL_ONLY}") from None
        if is_table_of_runs(table.columns):
            raise ValueError(
                f"{file}: W&B's table of runs, which has a row a run and no steps. Name a run as "
                "wandb://entity/project/run, with the run's ID, or export its line panels or `run.history()` as CSV."
            )
        columns = [name for name in table if not (RANGE_COLUMN.search(name) or INDEX_COLUMN.fullmatch(name))]
        steps = next((name for name in STEP_COLUMNS if name in columns), None)
        if steps is None:
            raise ValueError(
                f"{file}: no column {' or '.join(STEP_COLUMNS[:2])}. In W&B export a line panel as CSV, or save "
                f"`run.history()` of its API. {VERL_ONLY}"
            )
        # A panel's columns are called `RUN - METRIC`.
        runs |= {name.rpartition(" - ")[0] for name in columns if name not in STEP_COLUMNS} - {""}
        if len(runs) > 1:
            raise ValueError(f"{file}: {len(runs)} runs ({', '.join(sorted(runs))}). {ONE_RUN}")
        if separator == ";":
            table = table.apply(lambda column: column.str.replace(",", "."))
        for row in table[table[steps] != ""][columns].to_dict("records"):
            step = numbers_in(row).get(steps, math.nan)
            if not abs(step) <= 2**53 or step % 1:
                raise ValueError(f"{file}: {row[steps]!r:.60} is no step of a training.")
            for other in STEPS_ALONE:
                row.pop(other, None)
            row.pop(steps, None)
            texts = {name.rpartition(" - ")[2]: text.strip() for name, text in row.items() if text.strip()}
            # An empty cell or a word is no value; NaN is one.
            kept = numbers_in(texts)
            words |= {key: text for key, text in texts.items() if key not in kept and text[0] in "+-.0123456789"}
            before = rows.setdefault(int(step), {})
            if differ := [key for key, one in before.items() if key in kept and str(kept[key]) != str(one)]:
                raise ValueError(f"{file}, step {step:g}: a second value of {differ[0]}, as of several runs. {ONE_RUN}")
            before |= kept
    for metric, text in words.items():
        warnings.warn(f"{path}: no number, and left out: {metric} {text!r:.60}", stacklevel=2)
    return Log(rows)


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
        raise ValueError(f"wandb://{name}: not of the form wandb://entity/project/run, where run is the run's ID.")
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
