"""The command `clipx papers data`: list the data sets, build one, show a file."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from verl_clipx.common.command_line import end_help, fail, reporting_errors
from verl_clipx.common.terminal import TerminalConsole, deferring_warnings
from verl_clipx.papers.messages import fault_of_prompt

if TYPE_CHECKING:
    from verl_clipx.papers.tasks.building import SplitRecord
    from verl_clipx.papers.tasks.definition import DatasetDefinition

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
        rows = []
        for definition in definitions().values():
            splits = ", ".join(definition.splits)
            cells = (definition.name, definition.task, definition.kind, definition.summary, splits)
            rows.append([escape(cell) for cell in cells])
        headings = ("name", "task", "kind", "summary", "splits")
        console.print_list("clipx papers data build NAME --out DIR", headings, rows)
        return
    with reporting_errors():
        definition = definition_named(name)
    table = Table(show_header=False, title=definition.name)
    table.add_row("summary", escape(definition.summary))
    table.add_row("task, kind", f"{definition.task}, {definition.kind}")
    table.add_row("hub", definition.hub or "no hub: generated, or a local copy with --from")
    table.add_row("license", escape(definition.license))
    table.add_row("splits", ", ".join(definition.splits))
    table.add_row("prompts, the default first", ", ".join(definition.prompts))
    table.add_row("options", ", ".join(option_names(definition)) or "none")
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
    source: Annotated[
        Path | None, typer.Option("--from", help="A local copy of the data set, to be read instead of the hub.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt template to use. If you name none, the data set's first is used.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Keep at most this many rows of each split.")] = None,
    splits: Annotated[
        list[str] | None,
        typer.Option("--split", help="A split to build; you can repeat the option. Without it, all are built."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="KEY=VALUE", help="Set an option of the data set; you can repeat this for several."
        ),
    ] = None,
) -> None:
    """Build a data set: a Parquet file without duplicates for each split. A finished split is not built again."""
    from verl_clipx.papers.tasks.catalog import definition_named
    from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, TEMPLATES
    from verl_clipx.run.keys import CHAT_TEMPLATE

    # The warnings of the hub's client would tear the status line, so that they wait for the end.
    with reporting_errors(), deferring_warnings(console):
        definition = definition_named(name)
        options = _parse_options(assignments or [])
        split_records = []
        for split_name in splits or definition.splits:
            split_record = _build_or_advise(
                definition, out, source, split=split_name, prompt=prompt, limit=limit, options=options
            )
            split_records.append(split_record)
    for split_record in split_records:
        path = out / f"{split_record.request.split}.parquet"
        line = f"{path}: {split_record.rows} rows, {_describe_content(split_record)}"
        console.print(escape(line), soft_wrap=True)
    # One template makes the prompts of all splits.
    template = TEMPLATES.get(split_records[0].request.prompt)
    if template and template.plain_text:
        # Hydra needs the inner quotation marks, and the shell the outer ones.
        override = f'{CHAT_TEMPLATE}="\\"{PLAIN_TEXT_CHAT_TEMPLATE}\\""'
        hint = f"{template.name} is plain text for a base model. So that verl adds no chat markers to it, train with"
        console.print(escape(f"{hint}\n{override}"), soft_wrap=True)


def _build_or_advise(
    definition: "DatasetDefinition", out: Path, source: Path | None, *, split: str, **request: Any
) -> "SplitRecord":
    """Build a split as `build_split` does. If its repository on the hub can't be read, `fail` ends the command."""
    from verl_clipx.papers.tasks.building import build_split

    try:
        with TerminalConsole(stderr=True).status(escape(f"{definition.name}, {split}")):
            return build_split(definition, out, source=source, split=split, **request)
    except FileExistsError:
        # A file is in the way of the result, which is no fault of the hub.
        raise
    except OSError as error:
        reads_hub = source is None and definition.hub is not None
        if not reads_hub:
            raise
        # The hub's client raises many kinds of OSError, and a local copy helps with each of them.
        fail(f"{error}\nIf the hub ({definition.hub}) cannot be reached, give a local copy with --from PATH")


def _describe_content(record: "SplitRecord") -> str:
    """Return what a split's file holds apart from its rows: what was left out, and the hash."""
    return (
        f"{record.duplicates} duplicates left out ({record.conflicts} of them with another answer than the row that "
        f"was kept), sha256 {record.sha256}"
    )


@app.command(
    epilog=end_help(
        reads="the Parquet file, and in it the record that `clipx papers data build` wrote",
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
        # pyarrow takes no batch size of 0.
        batch_size = max(min(rows, total), 1)
        first_batch = next(parquet.iter_batches(batch_size=batch_size), None)
    console.print(f"{escape(str(file))}: {total} rows", soft_wrap=True)
    record = read_record(file)
    if record is None:
        origin = "not built by `clipx papers data build`"
    else:
        request = record.request
        origin = (
            f"{request.dataset}, split {request.split}, prompt {request.prompt}, from {request.source}, limit "
            f"{request.limit}, options {request.options}; {_describe_content(record)}"
        )
    console.print(escape(origin), soft_wrap=True)
    # A file without rows has no batch.
    first_rows = [] if first_batch is None else first_batch.to_pylist()[:rows]
    for number, row in enumerate(first_rows):
        _show_row(number, row)


def _show_row(number: int, row: dict[str, Any]) -> None:
    """Print a row: each chat message of its prompt in a panel, and everything else as JSON."""
    rest = dict(row)
    fault = fault_of_prompt(row.get("prompt"))
    if fault:
        console.print(f"[yellow]row {number}: {escape(fault)}; verl cannot read it[/]", soft_wrap=True)
    else:
        for message in rest.pop("prompt"):
            title = escape(f"row {number}: {message['role']}")
            console.print(Panel(escape(message["content"]), title=title, title_align="left"))
    console.print(escape(json.dumps(rest, indent=2, ensure_ascii=False, default=str)))


def _parse_options(assignments: list[str]) -> dict[str, Any]:
    """Return the options of a data set by name. A value that is not JSON is a text.

    Raises:
        ValueError: an assignment is not KEY=VALUE.
    """
    options = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key:
            raise ValueError(f"--option {assignment!r} is not KEY=VALUE")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        # Options are parameters of a function: test-size is test_size.
        options[key.replace("-", "_")] = value
    return options
