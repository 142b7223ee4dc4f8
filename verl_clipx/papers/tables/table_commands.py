"""The commands `clipx papers table list|plan|collect|render`, which turn runs into the papers' tables."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    """List the tables, and how many of their cells a run could fill."""
    from verl_clipx.papers.tables.definition import load_table, table_names

    tables = []
    for table_name in table_names():
        table = load_table(table_name)
        tables.append(
            {
                "name": table.name,
                "title": table.title,
                "source": table.source,
                "cells": table.count_measurable(table.rows),
                "presets": sum(source.preset is not None for source, _ in table.sources()),
                "made by": "benchmarks/table_fill.py" if table.in_one_process else "plan",
            }
        )
    if as_json:
        print_json(tables=tables)
        return
    rows = [[escape(str(value)) for value in table.values()] for table in tables]
    console.print_list(
        "clipx papers table plan NAME",
        ("name", "what", "source", "cells", "presets", "made by"),
        rows,
    )


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
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; by default the table's.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Group of configs/hardware; by default the table's.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a training; by default the table's.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only this row; you can repeat it.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this training seed; you can repeat it.")] = None,
    evaluation_options: Annotated[str, typer.Option(help="Further options for every `clipx papers eval run`.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the commands that still have to run. Each is a line for bash, or for a launcher."""
    from verl_clipx.papers.tables.table_plan import TRAIN, Places, plan_table

    table = _load(name)
    if table.in_one_process:
        fail(f"table {name}: `python benchmarks/table_fill.py {name}` makes its runs, in a checkout")
    places = Places(
        runs=runs,
        data=data or Path(table.data),
        hardware=hardware or table.hardware,
        nodes=nodes or table.nodes,
        evaluation_options=evaluation_options,
    )
    # The presets look for their data files there.
    os.environ["CLIPX_DATA"] = str(places.data)
    with reporting_errors():
        jobs = plan_table(table, places, tuple(seed or table.seeds), tuple(row or ()))
    waiting = [job for job in jobs if not job.done]
    if as_json:
        commands = [{"kind": job.kind, "label": job.label, "command": job.command, "done": job.done} for job in jobs]
        print_json(table=name, commands=commands)
        return
    trainings = sum(job.kind == TRAIN for job in waiting)
    console.print_line(f"# {name}: {len(waiting)} of {len(jobs)} commands left, of which {trainings} train.")
    for job in waiting:
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
    out: Annotated[Path | None, typer.Option(help="File of the results; by default RUNS/tables/<name>.json.")] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Only this row; the others stay empty. You can repeat it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the runs' numbers into a file. Refuse runs that are not the presets', and say what is missing."""
    from verl_clipx.papers.tables.collect import collect as collect_table

    table = _load(name)
    if not runs.is_dir():
        fail(f"--runs {runs}: there is no such folder. Give the one that `clipx papers table plan` trained in")
    # The runs look for their validation files there.
    os.environ.setdefault("CLIPX_DATA", table.data)
    out = out or default_results(runs, name)
    with reporting_errors():
        with progress_console.status("composing presets, reading runs"):
            results = collect_table(table, runs, rows=row or ())
        write_json(out, results)
    if as_json:
        print_json(**results, file=str(out))
        is_complete = results["runs"] and not results["refused"]
        raise typer.Exit(0 if is_complete else 1)
    measured = sum("mean" in cell for cell in results["cells"])
    possible = table.count_measurable([of_table for of_table in table.rows if not row or of_table.name in row])
    console.print_line(f"{measured} of {possible} cells from {len(results['runs'])} runs: {out}")
    for entry in results["refused"]:
        console.print(f"[red]refused[/] {escape(entry['folder'])}", soft_wrap=True)
        for reason in entry["reasons"]:
            console.print_line(f"  {reason}")
    if results["missing"]:
        number = len(results["missing"])
        console.print(f"[yellow]missing[/] {number} runs or numbers, listed in {out} under missing", soft_wrap=True)
    if not results["runs"] and not results["refused"]:
        example = min(table.runs_path(source) for source, _ in table.sources(row or ()))
        console.print_line(f"No run of this table is in {runs}. Its runs would be {runs / example}* and the like.")
    if results["refused"]:
        raise typer.Exit(1)


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
        Path | None, typer.Option(help="Results from `collect`; by default RUNS/tables/<name>.json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; by default standard output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a table in Markdown. It has the paper's and the measured numbers, intervals and differences."""
    from verl_clipx.papers.tables.collect import RESULTS, hash_of_definition
    from verl_clipx.papers.tables.render import cells_of
    from verl_clipx.papers.tables.render import render as render_table

    table = _load(name)
    path = results or default_results(runs, name)
    if results and not results.exists():
        fail(f"--results {results}: there is no such file. Make it with `clipx papers table collect {name}`")
    with reporting_errors():
        read = None
        if path.exists():
            read = read_json_object(path, {"definition": str})
            if read["definition"] != hash_of_definition(table):
                raise ValueError(
                    f"{path}: the table's definition has changed since then. "
                    f"Run `clipx papers table collect {name}` again"
                )
            check_shape(path, read, RESULTS)
        if as_json:
            if out is not None:
                fail("--json prints to standard output: leave out --out.", 2)
            print_json(table=name, title=table.title, source=table.source, cells=cells_of(table, read))
            return
        content = render_table(table, read)
        if out is None:
            typer.echo(content, nl=False)
        else:
            write_text(out, content)


def default_results(runs: Path, name: str) -> Path:
    """Return the file that `collect` writes and `render` reads."""
    return runs / "tables" / f"{name}.json"


def _load(name: str) -> "Table":
    from verl_clipx.papers.tables.definition import load_table

    with reporting_errors():
        return load_table(name)
