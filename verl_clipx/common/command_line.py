"""How commands end, and how they answer programs."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from verl_clipx.common.extras import missing_tool
from verl_clipx.common.terminal import TerminalConsole, print_plain
from verl_clipx.common.verl_version import installed_version

# How long a command works in a log before it says so.
SECONDS_OF_SILENCE = 3.0

# The command that was asked for JSON; None if none was.
_command_with_json: ContextVar[str | None] = ContextVar("_command_with_json", default=None)


def _remember(context: typer.Context, as_json: bool) -> bool:
    """Keeps which command was asked for JSON, so that its failure is JSON too; returns the option's value."""
    command = context.command_path.removeprefix(context.find_root().command_path).strip()
    _command_with_json.set(command if as_json else None)
    return as_json


AsJson = Annotated[
    bool, typer.Option("--json", callback=_remember, help="Print one JSON object instead of text, for programs.")
]


def end_help(*, reads: str, examples: tuple[str, str]) -> str:
    """Return the end of a command's help.

    Args:
        reads: The files that the command reads, as the rest of the sentence "Reads …".
        examples: Two command lines that a user could type.
    """
    # Click leaves the lines of a paragraph after \\b as they are.
    return f"Reads {reads}.\n\n\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)


class CommandGroup(TyperGroup):
    """A group of commands, which fails with a one-line message where a command needs a package that is missing."""

    def invoke(self, context: typer.Context) -> Any:
        """Run the command named on the command line."""
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            group = context.command_path.removeprefix(context.find_root().command_path)
            message = missing_tool(f"clipx{group} {context.invoked_subcommand}", error)
            if message is None:
                raise
            fail(message)


def forget_json() -> None:
    """Forgets which command was asked for JSON, as at the beginning of a command line."""
    _command_with_json.set(None)


def print_json(**content: Any) -> None:
    """Prints the one JSON object of a command's option --json: command, version, then the content.

    Numbers that are not finite become null, since JSON has none.
    """
    head = {"command": _command_with_json.get(), "version": installed_version("verl-clipx")}
    # Python writes such numbers as NaN or Infinity, which JSON lacks, and lets whoever reads them back replace them.
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    print_plain(json.dumps({**head, **finite}, indent=1, ensure_ascii=False, allow_nan=False))


def messages_console() -> TerminalConsole:
    """Return where warnings go: standard output or, where that has JSON, standard error."""
    return TerminalConsole(stderr=_command_with_json.get() is not None)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows that a command works while the block runs.

    A terminal gets a spinner. A log gets one line, if the block takes longer than `SECONDS_OF_SILENCE`.

    Args:
        what: what the command does, for example "Reading runs".
    """
    console = messages_console()
    if console.is_terminal:
        with console.status(what):
            yield
        return
    timer = threading.Timer(SECONDS_OF_SILENCE, print, [f"{what} …"], {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fail(error: Exception | str, code: int = 1) -> NoReturn:
    """Prints the message of an error that the user can fix, and ends the command.

    Under --json the message is printed as the key `error` of the JSON object.

    Args:
        error: the error, or its message.
        code: the command's exit code.

    Raises:
        typer.Exit: always.
    """
    if _command_with_json.get() is not None:
        print_json(error=str(error))
    else:
        TerminalConsole().print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
    raise typer.Exit(code) from None


@contextlib.contextmanager
def reporting_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the command by `fail` if the block raises an OSError, a ValueError or an error of one of further kinds."""
    try:
        yield
    except (OSError, ValueError, *kinds) as error:
        fail(error)
