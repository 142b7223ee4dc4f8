"""What the commands of `clipx eval` print with, and how they end."""

import contextlib
from collections.abc import Iterator

import typer
from rich.markup import escape

from verl_clipx.common.terminal import TerminalConsole

console = TerminalConsole()


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turn errors that a user can mend into their message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("interrupted; finished shards are kept, the same command goes on from there")
        raise typer.Exit(130) from None
