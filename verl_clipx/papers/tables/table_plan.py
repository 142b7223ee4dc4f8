"""Plans the commands that fill a table. Each is a line for bash; those that train or evaluate can go to a launcher."""

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from verl_clipx.analysis.runs.folder import RunFolder, run_path
from verl_clipx.common.files import parquet_file
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.papers.tables.definition import DATA_FOLDER, Column, Table, TableRow
from verl_clipx.papers.tables.measures import evaluation_folder, protocol_of
from verl_clipx.run.record import RunRecord
from verl_clipx.run.run_files import METRICS

PREPARE = "prepare"
TRAIN = "train"
EVALUATE = "evaluate"


@dataclass(frozen=True)
class Job:
    """A command of a plan.

    Args:
        kind: PREPARE, TRAIN or EVALUATE.
        label: what it makes, for display.
        command: a line for bash.
        done: whether its result already exists.
    """

    kind: str
    label: str
    command: str
    done: bool


@dataclass(frozen=True)
class Places:
    """Folders and machines that the commands name."""

    runs: Path
    data: Path
    """Folder of the data sets, for which definitions have DATA_FOLDER."""

    hardware: str
    nodes: int
    evaluation_options: str = ""
    """Further options of `clipx papers eval run`, after the table's."""


class BoundsSource(NamedTuple):
    """Where the clip bounds come from that a preset leaves open.

    Args:
        epsilon: which epsilon they follow: highest or average.
        metrics: the log of the run that had this epsilon.
    """

    epsilon: str
    metrics: Path


def plan_table(table: Table, places: Places, seeds: tuple[int, ...], rows: tuple[str, ...] = ()) -> list[Job]:
    """Return the commands that fill a table: first the data, then the training and evaluations of each seed and preset.

    Seeds are the outer loop, so that a half-finished table has all rows of the first seeds.

    Args:
        rows: names of the rows to fill; empty for all.

    Raises:
        FileNotFoundError: the recipes do not exist, because this is not a checkout.
        ValueError: there is no such row.
    """
    sources = table.sources(rows)
    jobs = [
        Job(
            kind=PREPARE,
            label=entry["makes"],
            command=entry["command"].replace(DATA_FOLDER, shlex.quote(str(places.data))),
            done=(places.data / entry["makes"]).exists(),
        )
        for entry in table.prepare
    ]
    for source, cells in sources:
        if source.model:
            model = source.model.replace(DATA_FOLDER, str(places.data))
            folder = places.runs / table.runs_path(source)
            jobs += _evaluation_jobs(table, places, cells, model, folder)
    for seed in seeds:
        for source, cells in sources:
            if source.preset:
                jobs += _jobs_of_run(table, places, cells, source.preset, seed)
    return jobs


def _jobs_of_run(
    table: Table, places: Places, cells: list[tuple[TableRow, Column]], preset: str, seed: int
) -> list[Job]:
    """Return the training of a preset with a seed, and its evaluations.

    Args:
        cells: the cells that are read from the preset's runs.
    """
    run = RunFolder(run_path(places.runs, preset, seed))
    evaluations = _evaluation_jobs(table, places, cells, str(run.path / "checkpoints"), run.path)
    has_all_evaluations = bool(evaluations) and all(job.done for job in evaluations)
    # After all evaluations, nothing that a training leaves is needed, and its checkpoints may have been removed.
    is_done = has_finished(run) or has_all_evaluations
    if not is_done:
        # The evaluations are of an earlier training. `clipx papers eval run` will refuse to continue them.
        evaluations = [replace(job, done=False) for job in evaluations]
    training = Job(
        kind=TRAIN,
        label=f"{preset}, seed {seed}",
        command=training_command(places, preset, seed, run.path, _bounds_source(places, cells, seed)),
        done=is_done,
    )
    return [training, *evaluations]


def has_finished(run: RunFolder) -> bool:
    """Return whether a training has made all its steps; False also if their number cannot be determined here."""
    if not run.is_trained or not run.metrics:
        return False
    total = run.run_record.length.steps or steps_by_data(run.run_record)
    return total is not None and run.last_step >= total


def steps_by_data(record: RunRecord) -> int | None:
    """Return how many steps a training makes: the whole batches of its training rows, times its epochs.

    Returns:
        None if a file of the training rows is not on this machine.
    """
    paths = [Path(name).expanduser() for name in record.data.paths]
    if not all(path.is_file() for path in paths):
        return None
    rows = sum(map(count_rows, paths))
    # verl takes -1 for all rows.
    largest_number = record.length.rows
    if largest_number is not None and largest_number > 0:
        rows = min(rows, largest_number)
    batches = rows // record.batch.prompts
    return batches * record.length.epochs


def count_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file."""
    with parquet_file(path) as file:
        return file.metadata.num_rows


def _bounds_source(places: Places, cells: list[tuple[TableRow, Column]], seed: int) -> BoundsSource | None:
    """Return where the open clip bounds of a preset come from; None if it leaves none open.

    Args:
        cells: the cells that are read from the preset's runs.
    """
    for row, column in cells:
        preset = row.measured_on.get(column.variant)
        if preset is not None:
            return BoundsSource(epsilon=row.measured_epsilon, metrics=run_path(places.runs, preset, seed) / METRICS)
    return None


def training_command(
    places: Places, preset: str, seed: int, run: Path, bounds_source: BoundsSource | None = None
) -> str:
    """Return the line for bash that trains. It calls the recipes' own `launch` with the preset's name.

    Args:
        run: the folder of the run.
        bounds_source: for a preset with open clip bounds.

    Raises:
        FileNotFoundError: the recipes do not exist.
    """
    recipes = configs_folder().parent / "recipes" / "common.sh"
    if not recipes.is_file():
        raise FileNotFoundError(
            f"{recipes}: does not exist. Run this from a checkout of the repository, not from a wheel"
        )
    with contextlib.suppress(ValueError):
        recipes = recipes.relative_to(Path.cwd())
    variables = {
        "CLIPX_DATA": str(places.data),
        "HARDWARE": places.hardware,
        "NNODES": str(places.nodes),
        "SEED": str(seed),
        "RUN_FOLDER": str(run),
    }
    if places.hardware == "cpu":
        # The check of the environment would take a third of such a run.
        variables |= {"VERL_PLATFORM": "cpu", "PREFLIGHT": "0"}
    commands = ["set -eu", f"source {shlex.quote(str(recipes))}"]
    launch = f"launch {preset}"
    if bounds_source:
        metrics = shlex.quote(str(bounds_source.metrics))
        measure = f"python3 -m verl_clipx.papers.tables.measured_bounds {metrics} {bounds_source.epsilon}"
        # Under `set -e` a failure ends the line in an assignment, but not among the arguments of `launch`.
        commands.append(f"bounds=$({measure})")
        launch = f"{launch} $bounds"
    script = "; ".join([*commands, launch])
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{assignments} bash -c {shlex.quote(script)}"


def _evaluation_jobs(
    table: Table, places: Places, cells: list[tuple[TableRow, Column]], model: str, folder: Path
) -> list[Job]:
    """Return the evaluations that some cells need, one for each benchmark.

    Args:
        cells: all cells that are read from `folder`.
        model: what is evaluated: a folder of checkpoints, or a model's path or id on the hub.
        folder: the run, or the folder of a model's evaluations.
    """
    jobs: dict[str, Job] = {}
    for row, column in cells:
        for benchmark in table.benchmarks_of(row, column):
            jobs[benchmark] = Job(
                kind=EVALUATE,
                label=f"{folder.name} on {benchmark}",
                command=_evaluation_command(table, places, row, benchmark, model, folder),
                done=evaluation_folder(folder, benchmark).results_path.exists(),
            )
    return list(jobs.values())


def _evaluation_command(table: Table, places: Places, row: TableRow, benchmark: str, model: str, folder: Path) -> str:
    """Return the line for bash that evaluates.

    Args:
        row: the row whose options are added.
        table, places, model, folder: as for `_evaluation_jobs`.
    """
    settings = table.benchmarks[benchmark]
    words = ["clipx", "papers", "eval", "run", model]
    words += ["--benchmark", f"{benchmark}={places.data / settings['file']}"]
    words += ["--out", str(evaluation_folder(folder, benchmark).path)]
    words += ["--protocol", protocol_of(row, settings)]
    for key in ("samples", "temperature", "max_tokens", "top_p"):
        if key in settings:
            option = key.replace("_", "-")
            words += [f"--{option}", str(settings[key])]
    # If an option comes twice, the last one counts.
    for options in (table.evaluation_options, row.evaluation_options, places.evaluation_options):
        words += shlex.split(options)
    return shlex.join(words)
