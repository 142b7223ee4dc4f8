"""Plans the commands that fill a table, and runs them."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.files import write_json
from verl_clipx.common.with_parent import end_with_parent
from verl_clipx.papers.tables.collect import commit_here, versions_here
from verl_clipx.papers.tables.definition import Column, Row, Source, Table
from verl_clipx.papers.tables.measures import protocol_of, read_evaluation
from verl_clipx.runs.folder import RunFolder, run_path

PREPARE, TRAIN, EVALUATE = "prepare", "train", "evaluate"
SECONDS_BETWEEN_LOOKS = 2


@dataclass(frozen=True)
class Job:
    """A command of a plan.

    Args:
        kind: PREPARE, TRAIN or EVALUATE.
        label: what it makes, for display.
        command: a line for bash.
        folder: where its log goes; for a training, the run's folder.
        done: whether its result already exists.
    """

    kind: str
    label: str
    command: str
    folder: Path
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
    """Further options of `clipx eval run`, after the table's."""


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
            PREPARE,
            entry["makes"],
            entry["command"].replace("{data}", shlex.quote(str(places.data))),
            places.runs / "logs",
            (places.data / entry["makes"]).exists(),
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
        TRAIN,
        f"{source.preset}, seed {seed}",
        training_command(places, source.preset, seed, run.path, _bounds(places, cells, seed)),
        run.path,
        trained,
    )
    # Evaluations of an earlier training do not count; `clipx eval run` itself will refuse them.
    return [train, *(job if trained else replace(job, done=False) for job in evaluations)]


def is_trained(run: RunFolder) -> bool:
    """Return whether a run has made all its steps. If their number cannot be determined, it has not."""
    if not run.is_trained or not run.metrics:
        return False
    total = run.total_steps
    if total is None:
        from verl_clipx.papers.tables.cost.work import steps_of

        total = steps_of(run.config)
    return total is not None and run.last_step >= total


def _bounds(places: Places, cells: list[tuple[Row, Column]], seed: int) -> tuple[str, Path] | None:
    for row, column in cells:
        if row.measured_bounds and column.run in row.measured_bounds:
            measured_on = run_path(places.runs, row.measured_bounds[column.run], seed)
            return row.measured_bounds["group"], measured_on / "metrics.jsonl"
    return None


def training_command(places: Places, preset: str, seed: int, run: Path, bounds: tuple[str, Path] | None = None) -> str:
    """Return the line that trains, which calls the recipes' own `launch` with the preset's name.

    Args:
        bounds: a method group, and the metrics from which `clipx bounds` measures its open clip bounds.

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
        # The estimate behind the preflight knows GPUs only.
        variables |= {"VERL_PLATFORM": "cpu", "PREFLIGHT": "0"}
    script = f"set -eu; source {shlex.quote(str(recipes))}; launch {preset}"
    if bounds:
        group, metrics = bounds
        script += f" $(clipx bounds {shlex.quote(str(metrics))} | sed -n 's/^+clipx={group} //p')"
    assignments = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    return f"{assignments} bash -c {shlex.quote(script)}"


def _evaluations(table: Table, places: Places, cells: list[tuple[Row, Column]], model: str, folder: Path) -> list[Job]:
    jobs = {}
    for row, column in cells:
        for benchmark in table.benchmarks_of(row, column):
            settings = table.benchmarks[benchmark]
            arguments = ["clipx", "eval", "run", model.replace("{data}", str(places.data))]
            arguments += ["--benchmark", f"{benchmark}={places.data / settings['file']}"]
            arguments += ["--out", str(folder / "evaluation" / benchmark)]
            arguments += ["--protocol", protocol_of(row, settings)]
            for key in ("samples", "temperature", "max_tokens", "top_p", "cluster"):
                if key in settings:
                    arguments += [f"--{key.replace('_', '-')}", str(settings[key])]
            for options in (table.evaluation_options, row.evaluation_options, places.evaluation_options):
                arguments += shlex.split(options)
            jobs[benchmark] = Job(
                EVALUATE,
                f"{folder.name} on {benchmark}",
                shlex.join(arguments),
                folder,
                read_evaluation(folder, benchmark) is not None,
            )
    return list(jobs.values())


def run_job(job: Job, on_step: Callable[[int, int | None], None]) -> int:
    """Run a command of a plan. Its output goes to `<kind>.log` in its folder.

    A training that succeeds leaves run.json with the commit, the versions and the seconds that it took.

    Args:
        on_step: called whenever a training has logged, with its last step and its number of steps, if known.

    Returns:
        The exit code; 130 after an interrupt. If this process is killed, the command gets a SIGTERM.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    # `clipx` and `python` in the commands are this environment's.
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    started = time.time()
    with (job.folder / f"{job.kind}.log").open("ab") as log, _interruptible():
        # It gets its own session, so that the terminal's Ctrl-C does not reach it a second time while it cleans up.
        process = subprocess.Popen(
            ["bash", "-c", job.command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        try:
            # Metrics from before the start belong to an earlier one.
            last_look = started
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_BETWEEN_LOOKS)
                run, written = RunFolder(job.folder), _written(job.folder / "metrics.jsonl")
                if job.kind == TRAIN and run.is_trained and written > last_look:
                    last_look = written
                    on_step(run.last_step, run.total_steps)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            return 130
    if job.kind == TRAIN and process.returncode == 0:
        record = {"commit": commit_here(), "versions": versions_here(), "seconds": round(time.time() - started, 1)}
        write_json(job.folder / "run.json", record)
    return process.returncode


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT, SIGTERM and a terminal's SIGHUP raise KeyboardInterrupt, also in a shell's background job.

    A shell lets its background jobs ignore SIGINT.
    """

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    # Under nohup, SIGHUP is ignored from the start and must stay so.
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _written(path: Path) -> float:
    """Return when a file was last written, or 0 if it does not exist."""
    return path.stat().st_mtime if path.is_file() else 0
