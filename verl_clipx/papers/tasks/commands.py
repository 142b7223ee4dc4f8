"""The command `clipx papers data`: list the data sets, build one, show a file."""

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from verl_clipx.common.command_line import end_help, fail, reporting_errors
from verl_clipx.common.terminal import TerminalConsole, deferring_warnings
from verl_clipx.papers.messages import fault_of_prompt

app = typer.Typer(no_args_is_help=True, help="The papers' data sets in verl's format.")
console = TerminalConsole()


@app.command(
    "list",
    epilog=end_help(
        reads="no files of yours: the data sets are described in the package",
        examples=(
            "clipx papers data list",
            "clipx papers data list countdown_3to4",
        ),
    ),
)
def list_datasets(name: Annotated[str | None, typer.Argument(help="A data set, to show its details.")] = None) -> None:
    """List the data sets that can be built, or show the details of one."""
    from verl_clipx.papers.tasks.building import option_names
    from verl_clipx.papers.tasks.catalog import definition_named, definitions

    if name is None:
        sets = definitions().values()
        rows = [list(map(escape, (one.name, one.task, one.kind, one.summary, ", ".join(one.splits)))) for one in sets]
        console.print_list("clipx papers data build NAME --out DIR", ("name", "task", "kind", "what", "splits"), rows)
        return
    with reporting_errors():
        one = definition_named(name)
    table = Table(show_header=False, title=one.name)
    table.add_row("what", escape(one.summary))
    table.add_row("task, kind", f"{one.task}, {one.kind}")
    table.add_row("hub", one.hub or "no hub: generated, or a local copy with --from")
    table.add_row("license", escape(one.license))
    table.add_row("splits", ", ".join(one.splits))
    table.add_row("prompts, the default first", ", ".join(one.prompts))
    table.add_row("options", ", ".join(option_names(one)) or "none")
    console.print(table)


@app.command(
    epilog=end_help(
        reads="the data set from the hub, or the copy that --from names; generated data sets need neither",
        examples=(
            "clipx papers data build countdown --out data/countdown",
            "clipx papers data build aime24 --out data/aime24 --prompt r1_base",
        ),
    ),
)
def build(
    name: Annotated[str, typer.Argument(help="The data set; `clipx papers data list` names them all.")],
    out: Annotated[Path, typer.Option(help="Folder to write <split>.parquet to.")],
    source: Annotated[Path | None, typer.Option("--from", help="A local copy to read instead of the hub.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt template; by default the data set's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Largest number of rows to keep of each split.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Only this split; you can repeat it.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the data set, KEY=VALUE; you can repeat it.")
    ] = None,
) -> None:
    """Build a data set: a deduplicated Parquet file for each split. Splits finished before are not made again."""
    from verl_clipx.papers.tasks.building import build_split
    from verl_clipx.papers.tasks.catalog import definition_named
    from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, TEMPLATES
    from verl_clipx.run.keys import CHAT_TEMPLATE

    with reporting_errors(), deferring_warnings(console):
        definition = definition_named(name)
        options = _parse_options(option or [])
        records = []
        for part in split or definition.splits:
            try:
                with TerminalConsole(stderr=True).status(escape(f"{name}, {part}")):
                    records.append(
                        build_split(
                            definition, out, split=part, prompt=prompt, source=source, limit=limit, options=options
                        )
                    )
            except OSError as error:
                # The hub's client raises many kinds of OSError, and one advice fits all.
                if source is not None or not definition.hub or isinstance(error, FileExistsError):
                    raise
                fail(f"{error}\nIf the hub ({definition.hub}) cannot be reached, give a local copy with --from PATH")
    for record in records:
        console.print(
            f"{escape(str(out / record.request.split))}.parquet: {record.rows} rows, {record.duplicates} duplicates "
            f"left out ({record.conflicts} with another answer), sha256 {record.sha256}",
            soft_wrap=True,
        )
    template = TEMPLATES.get(records[0].request.prompt)
    if template and template.plain_text:
        override = f'{CHAT_TEMPLATE}="\\"{PLAIN_TEXT_CHAT_TEMPLATE}\\""'
        hint = f"{template.name}: the prompt is plain text for a base model; verl adds no chat markers to it with"
        console.print(escape(f"{hint}\n{override}"), soft_wrap=True)


@app.command(
    epilog=end_help(
        reads="the Parquet file, and the record that `clipx papers data build` wrote next to it",
        examples=(
            "clipx papers data show data/countdown/train.parquet",
            "clipx papers data show data/countdown/test.parquet --rows 3",
        ),
    ),
)
def show(
    file: Annotated[Path, typer.Argument(help="A Parquet file in verl's schema.")],
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to show, from the first.")] = 1,
) -> None:
    """Show how a file was built, and its first rows. Prompts are shown as the policy's chat messages."""
    from verl_clipx.common.files import parquet_file
    from verl_clipx.papers.tasks.building import read_record

    with reporting_errors(), parquet_file(file) as parquet:
        total = parquet.metadata.num_rows
        first = next(parquet.iter_batches(batch_size=max(min(rows, total), 1)), None)
    console.print(f"{escape(str(file))}: {total} rows", soft_wrap=True)
    record = read_record(file)
    how = "not built by `clipx papers data build`"
    if record is not None:
        request = record.request
        how = (
            f"{request.dataset}, split {request.split}, prompt {request.prompt}, from {request.source}, limit "
            f"{request.limit}, options {request.options}; {record.duplicates} duplicates left out ({record.conflicts} "
            f"with another answer), sha256 {record.sha256}"
        )
    console.print(escape(how), soft_wrap=True)
    for number, row in enumerate(first.to_pylist()[:rows] if first is not None else []):
        _show_row(number, row)


def _show_row(number: int, row: dict[str, Any]) -> None:
    fault = fault_of_prompt(row.get("prompt"))
    if fault:
        console.print(f"[yellow]row {number}: {escape(fault)}; verl cannot read it[/]", soft_wrap=True)
    for message in [] if fault else row.pop("prompt"):
        content = escape(message["content"])
        console.print(Panel(content, title=escape(f"row {number}: {message['role']}"), title_align="left"))
    console.print(escape(json.dumps(row, indent=2, ensure_ascii=False, default=str)))


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ValueError(f"--option {pair!r} is not KEY=VALUE")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        options[key.replace("-", "_")] = value
    return options
