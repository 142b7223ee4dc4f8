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

# How long a command may work before it says so in a log.
SECONDS_OF_SILENCE = 3.0

# The command that was asked for JSON; None if none was.
_json_of: ContextVar[str | None] = ContextVar("_json_of", default=None)


def _remember(context: typer.Context, as_json: bool) -> bool:
    """Keeps which command was asked for JSON, so that its failure is JSON too; returns the option's value."""
    command = context.command_path.removeprefix(context.find_root().command_path).strip()
    _json_of.set(command if as_json else None)
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
    """Begins a command line: none of its commands has been asked for JSON yet."""
    _json_of.set(None)


def print_json(**content: Any) -> None:
    """Prints the one JSON object of a command's option --json: command, version, then the content.

    Numbers that are not finite become null, since JSON has none.
    """
    head = {"command": _json_of.get(), "version": installed_version("verl-clipx")}
    # Python writes such numbers as constants that are none of JSON's, and lets its reader say what they are.
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    print_plain(json.dumps({**head, **finite}, indent=1, ensure_ascii=False, allow_nan=False))


def messages_console() -> TerminalConsole:
    """Returns where warnings go: to standard output like everything else, but beside JSON to standard error."""
    return TerminalConsole(stderr=_json_of.get() is not None)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows in the block that a command works: a spinner on a terminal, and in a log one line, if it takes longer."""
    console = messages_console()
    if console.is_terminal:
        with console.status(what):
            yield
        return
    line = threading.Timer(SECONDS_OF_SILENCE, print, [f"{what} …"], {"file": sys.stderr, "flush": True})
    line.start()
    try:
        yield
    finally:
        line.cancel()


def fail(error: Exception | str, code: int = 1) -> NoReturn:
    """Ends a command with the message of an error that its user can fix; under --json, as the key `error`."""
    if _json_of.get() is not None:
        print_json(error=str(error))
    else:
        TerminalConsole().print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
    raise typer.Exit(code) from None


@contextlib.contextmanager
def reporting_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Within the block, an OSError, a ValueError or one of further kinds ends the command with its message."""
    try:
        yield
    except (OSError, ValueError, *kinds) as error:
        fail(error)
