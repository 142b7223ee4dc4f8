"""The console of the `clipx eval` commands, and how they report errors."""

import contextlib
from collections.abc import Iterator

import typer

from verl_clipx.common.command_line import fail
from verl_clipx.common.terminal import TerminalConsole

console = TerminalConsole()


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Replace the traceback of errors that a user can fix with their message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    except KeyboardInterrupt:
        console.print("interrupted; finished shards are kept, and the same command continues from there")
        raise typer.Exit(130) from None
