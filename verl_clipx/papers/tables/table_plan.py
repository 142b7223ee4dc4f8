"""Plans the commands that fill a table: lines for bash, of which the launchers take those that train or evaluate."""

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from verl_clipx.analysis.runs.folder import RunFolder, run_path
from verl_clipx.common.files import parquet_file
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.papers.tables.definition import Column, Row, Source, Table
from verl_clipx.papers.tables.measures import evaluation_of, protocol_of

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
    """Folder of the data sets, which is `{data}` in definitions."""

    hardware: str
    nodes: int
    evaluation_options: str = ""
    """Further options of `clipx papers eval run`, after the table's."""


def plan_table(table: Table, places: Places, seeds: tuple[int, ...], rows: tuple[str, ...] = ()) -> list[Job]:
    """Return the commands that fill a table: first the data, then the training and evaluations of each seed and preset.

    Seeds are the outer loop, so that a half-finished table has all rows of the first seeds.

    Args:
        rows: names of the rows to fill; empty for all.

    Raises:
        FileNotFoundError: the recipes do not exist, because this is not a checkout.
        ValueError: there is no such row.
    """
    sources = list(table.sources(rows))
    jobs = [
        Job(
            kind=PREPARE,
            label=entry["makes"],
            command=entry["command"].replace("{data}", shlex.quote(str(places.data))),
            done=(places.data / entry["makes"]).exists(),
        )
        for entry in table.prepare
    ]
    for source, cells in sources:
        if source.model:
            jobs += _evaluations(table, places, cells, source.model, places.runs / table.folder_of(source))
    for seed in seeds:
        for source, cells in sources:
            if source.preset:
                jobs += _run(table, places, source, cells, seed)
    return jobs


def _run(table: Table, places: Places, source: Source, cells: list[tuple[Row, Column]], seed: int) -> list[Job]:
    run = RunFolder(run_path(places.runs, source.preset, seed))
    evaluations = _evaluations(table, places, cells, str(run.path / "checkpoints"), run.path)
    # The checkpoints may have been removed after the evaluations.
    trained = is_trained(run) or (bool(evaluations) and all(job.done for job in evaluations))
    train = Job(
        kind=TRAIN,
        label=f"{source.preset}, seed {seed}",
        command=training_command(places, source.preset, seed, run.path, _bounds(places, cells, seed)),
        done=trained,
    )
    # Evaluations of an earlier training do not count; `clipx papers eval run` itself will refuse them.
    return [train, *(job if trained else replace(job, done=False) for job in evaluations)]


def is_trained(run: RunFolder) -> bool:
    """Return whether a run has made all its steps. If their number cannot be determined, it has not."""
    if not run.is_trained or not run.metrics:
        return False
    total = run.config.trainer.total_training_steps or steps_by_data(run.config)
    return total is not None and run.last_step >= total


def steps_by_data(config: DictConfig) -> int | None:
    """Return the whole batches of the training rows times the epochs; None if a file of them is not on this machine."""
    named = config.data.train_files
    files = [Path(name).expanduser() for name in ([named] if isinstance(named, str) else named)]
    if not all(file.is_file() for file in files):
        return None
    rows = sum(map(rows_in, files))
    most = config.data.get("train_max_samples", -1)
    rows = min(rows, most) if most > 0 else rows
    return rows // config.data.train_batch_size * config.trainer.total_epochs


def rows_in(path: Path) -> int:
    """Return the number of rows of a Parquet file."""
    with parquet_file(path) as file:
        return file.metadata.num_rows


def _bounds(places: Places, cells: list[tuple[Row, Column]], seed: int) -> tuple[str, Path] | None:
    for row, column in cells:
        if row.measured_bounds and column.variant in row.measured_bounds:
            measured_on = run_path(places.runs, row.measured_bounds[column.variant], seed)
            return row.measured_bounds["of"], measured_on / "metrics.jsonl"
    return None


def training_command(places: Places, preset: str, seed: int, run: Path, bounds: tuple[str, Path] | None = None) -> str:
    """Return the line that trains, which calls the recipes' own `launch` with the preset's name.

    Args:
        bounds: which epsilon open clip bounds follow, and the metrics on which they are measured.

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
    script = f"set -eu; source {shlex.quote(str(recipes))}"
    launch = f"launch {preset}"
    if bounds:
        which, metrics = bounds
        measure = f"python3 -m verl_clipx.papers.tables.measured_bounds {shlex.quote(str(metrics))} {which}"
        # As an assignment, so that a failure ends the line.
        script = f"{script}; bounds=$({measure})"
        launch = f"{launch} $bounds"
    assignments = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    return f"{assignments} bash -c {shlex.quote(f'{script}; {launch}')}"


def _evaluations(table: Table, places: Places, cells: list[tuple[Row, Column]], model: str, folder: Path) -> list[Job]:
    jobs = {}
    for row, column in cells:
        for benchmark in table.benchmarks_of(row, column):
            settings = table.benchmarks[benchmark]
            arguments = ["clipx", "papers", "eval", "run", model.replace("{data}", str(places.data))]
            arguments += ["--benchmark", f"{benchmark}={places.data / settings['file']}"]
            arguments += ["--out", str(folder / "evaluation" / benchmark)]
            arguments += ["--protocol", protocol_of(row, settings)]
            for key in ("samples", "temperature", "max_tokens", "top_p"):
                if key in settings:
                    arguments += [f"--{key.replace('_', '-')}", str(settings[key])]
            for options in (table.evaluation_options, row.evaluation_options, places.evaluation_options):
                arguments += shlex.split(options)
            jobs[benchmark] = Job(
                kind=EVALUATE,
                label=f"{folder.name} on {benchmark}",
                command=shlex.join(arguments),
                done=evaluation_of(folder, benchmark).results.exists(),
            )
    return list(jobs.values())
