"""The commands `clipx papers table list|plan|collect|render`, which turn runs into the papers' tables."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from verl_clipx.common.command_line import AsJson, end_help, fail, print_json, reporting_errors
from verl_clipx.common.files import check_shape, read_json_object, write_json, write_text
from verl_clipx.common.terminal import TerminalConsole

if TYPE_CHECKING:
    from verl_clipx.papers.tables.definition import Table

app = typer.Typer(no_args_is_help=True, help="The papers' tables: plan runs, collect results, print them.")
console = TerminalConsole()
progress_console = TerminalConsole(stderr=True)

Name = Annotated[str, typer.Argument(help="A table; `clipx papers table list` names them.")]
Runs = Annotated[
    Path, typer.Option(help="Folder of all runs: <preset>-seed<seed> in it, such as bapo/octothinker_3b_bapo-seed1.")
]
DEFAULT_RUNS = Path("runs")


@app.command(
    "list",
    epilog=end_help(
        reads="no files of yours: the tables' definitions come with the package",
        examples=(
            "clipx papers table list",
            "clipx papers table list --json",
        ),
    ),
)
def list_tables(as_json: AsJson = False) -> None:
    """List the tables, with the number of cells that runs could fill."""
    from verl_clipx.papers.tables.definition import table_names

    entries = []
    for table_name in table_names():
        table = _load(table_name)
        preset_count = sum(bool(source.preset) for source, _ in table.sources())
        entries.append(
            {
                "name": table.name,
                "title": table.title,
                "source": table.source,
                "cells": table.count_measurable(table.rows),
                "presets": preset_count,
                "made by": "benchmarks/table_fill.py" if table.in_one_process else "plan",
            }
        )
    if as_json:
        print_json(tables=entries)
        return
    rows = []
    for entry in entries:
        rows.append([escape(str(value)) for value in entry.values()])
    headings = ("name", "title", "source", "measurable cells", "presets", "made by")
    console.print_list("Tables (clipx papers table plan NAME)", headings, rows)


@app.command(
    epilog=end_help(
        reads="which runs and data sets are already there",
        examples=(
            "clipx papers table plan acpo_table1a",
            "clipx papers table plan cpu_small --runs runs --seed 1 --seed 2",
        ),
    ),
)
def plan(
    name: Name,
    runs: Runs = DEFAULT_RUNS,
    data: Annotated[
        Path | None, typer.Option(help="The folder of the data sets. Without it, the one that the table names.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The group of configs/hardware to train with. Without it, the table's.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="The number of nodes of a training. Without it, the table's.")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="A row to fill; you can repeat the option. Without it, all are.")
    ] = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="A training seed; you can repeat the option. Without it, the table's seeds."),
    ] = None,
    evaluation_options: Annotated[str, typer.Option(help="Options to add to every `clipx papers eval run`.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the commands that still have to run.

    Each is one line for bash. A cluster's launcher can take the lines that train or evaluate.
    """
    from verl_clipx.papers.tables.table_plan import TRAIN, Places, plan_table

    table = _load(name)
    if table.in_one_process:
        fail(f"table {name} has no plan: in a checkout, `python benchmarks/table_fill.py {name}` makes its runs")
    places = Places(
        runs=runs,
        data=data or Path(table.data),
        hardware=hardware or table.hardware,
        nodes=nodes or table.nodes,
        evaluation_options=evaluation_options,
    )
    # The configurations of earlier runs contain this variable in the paths of their data files.
    os.environ["CLIPX_DATA"] = str(places.data)
    with reporting_errors():
        jobs = plan_table(table, places, tuple(seeds or table.seeds), tuple(rows or ()))
    if as_json:
        print_json(table=name, commands=[asdict(job) for job in jobs])
        return
    open_jobs = [job for job in jobs if not job.done]
    training_count = sum(job.kind == TRAIN for job in open_jobs)
    console.print_line(f"# {name}: {len(open_jobs)} of {len(jobs)} commands left, of which {training_count} train.")
    for job in open_jobs:
        console.print_line(f"\n# {job.kind}: {job.label}\n{job.command}")


@app.command(
    epilog=end_help(
        reads="the logs, the records and the evaluations of the runs below --runs",
        examples=(
            "clipx papers table collect acpo_table1a",
            "clipx papers table collect cpu_small --runs runs --out cpu_small.json",
        ),
    ),
)
def collect(
    name: Name,
    runs: Runs = DEFAULT_RUNS,
    out: Annotated[
        Path | None, typer.Option(help="The file to write the results to. Without it, RUNS/tables/<name>.json.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--row", help="A row to collect; you can repeat the option. Without it, all are."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the runs' numbers into a file. Refuse runs whose configuration differs from their preset's.

    The file lists what is missing. With --row, it has only the numbers of these rows. The exit code is 1 if a run or an
    evaluation is refused, or if there is no run at all.
    """
    from verl_clipx.papers.tables.collect import collect as collect_table

    table = _load(name)
    row_names = rows or []
    if not runs.is_dir():
        fail(f"--runs {runs}: there is no such folder. Give the --runs of `clipx papers table plan`")
    # The runs' configurations contain this variable in the paths of their validation files. A user may have set it.
    os.environ.setdefault("CLIPX_DATA", table.data)
    results_path = out or default_results(runs, name)
    with reporting_errors():
        with progress_console.status("composing presets, reading runs"):
            results = collect_table(table, runs, rows=row_names)
        write_json(results_path, results)
    if as_json:
        print_json(**results, file=str(results_path))
    else:
        _print_collected(table, row_names, results, runs, results_path)
    if results["refused"] or not results["runs"]:
        raise typer.Exit(1)


def _print_collected(
    table: "Table", row_names: Sequence[str], results: Mapping[str, Any], runs: Path, results_path: Path
) -> None:
    """Print how many numbers were collected, what was refused and why, and how much is missing.

    Args:
        row_names: names of the rows that were collected; empty for all.
        results: from `collect`.
        runs: the folder of all runs.
        results_path: the file of the results.
    """
    rows = table.chosen_rows(row_names)
    counted_names = {row.name for row in rows}
    # The difference of two chosen rows may also have a number. If its own row was not chosen, it is not counted.
    measured = sum("mean" in cell for cell in results["cells"] if cell["row"] in counted_names)
    measurable = table.count_measurable(rows)
    console.print_line(f"{measured} of {measurable} cells from {len(results['runs'])} runs: {results_path}")
    if row_names:
        console.print_line(
            f"The file has only the runs of {', '.join(row_names)}, and replaces an earlier file of this name. Collect "
            "without --row for all rows."
        )
    for refusal in results["refused"]:
        console.print(f"[red]refused[/] {escape(refusal['folder'])}", soft_wrap=True)
        for reason in refusal["reasons"]:
            console.print_line(f"  {reason}")
    if results["missing"]:
        missing = f"{len(results['missing'])} runs or numbers; {results_path} lists them under the key `missing`."
        console.print(f"[yellow]missing[/] {escape(missing)}", soft_wrap=True)
    if not results["runs"] and not results["refused"]:
        console.print_line(_explain_no_run(table, row_names, runs))


def _explain_no_run(table: "Table", row_names: Sequence[str], runs: Path) -> str:
    """Return why nothing was collected: no run is there, or no run fills the chosen rows.

    Args:
        row_names, runs: as for `_print_collected`.
    """
    from verl_clipx.analysis.runs.folder import run_path

    sources = table.sources(row_names)
    if not sources:
        return (
            f"No run fills {', '.join(row_names)}: such a row is only quoted, or is the difference of two other rows; "
            "name those with --row, too."
        )
    source, _ = sources[0]
    example = runs / table.runs_path(source)
    if source.preset:
        example = run_path(runs, source.preset, table.seeds[0])
    return f"No run of this table is in {runs}. {example} would be one."


@app.command(
    epilog=end_help(
        reads="the results that `clipx papers table collect` wrote",
        examples=(
            "clipx papers table render acpo_table1a",
            "clipx papers table render cpu_small --results cpu_small.json --out cpu_small.md",
        ),
    ),
)
def render(
    name: Name,
    runs: Runs = DEFAULT_RUNS,
    results: Annotated[
        Path | None, typer.Option(help="The file that `collect` wrote. Without it, RUNS/tables/<name>.json.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write the table to. Without it, standard output.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a table in Markdown. It has the paper's and the measured numbers, intervals and differences."""
    from verl_clipx.papers.tables.collect import RESULTS, hash_of_definition
    from verl_clipx.papers.tables.render import cells_of
    from verl_clipx.papers.tables.render import render as render_table

    if as_json and out is not None:
        fail("--json prints to standard output: leave out --out.", 2)
    table = _load(name)
    if results and not results.exists():
        fail(f"--results {results}: there is no such file. Make it with `clipx papers table collect {name}`")
    results_path = results or default_results(runs, name)
    with reporting_errors():
        collected = None
        if results_path.exists():
            collected = read_json_object(results_path, {"definition": str})
            if collected["definition"] != hash_of_definition(table):
                raise ValueError(
                    f"{results_path}: the table's definition has changed since these results were collected. "
                    f"Run `clipx papers table collect {name}` again"
                )
            check_shape(results_path, collected, RESULTS)
        if as_json:
            print_json(table=name, title=table.title, source=table.source, cells=cells_of(table, collected))
            return
        content = render_table(table, collected)
        if out is None:
            typer.echo(content, nl=False)
        else:
            write_text(out, content)


def default_results(runs: Path, name: str) -> Path:
    """Return the file that `collect` writes and `render` reads unless the user names another."""
    return runs / "tables" / f"{name}.json"


def _load(name: str) -> "Table":
    """Return the table of a name, or end the command with a message."""
    from verl_clipx.papers.tables.definition import load_table

    with reporting_errors():
        return load_table(name)
