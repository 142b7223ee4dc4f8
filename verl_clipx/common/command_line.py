"""How commands end, and how they show progress."""

from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_clipx.common.terminal import TerminalConsole


def fail(error: Exception | str, code: int = 1) -> NoReturn:
    """Ends a command with the message of an error that its user can mend.

    Raises:
        typer.Exit: with the code.
    """
    TerminalConsole().print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
    raise typer.Exit(code) from None


def progress_bar() -> Progress:
    """A bar on standard error whose tasks have a number of steps."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=TerminalConsole(stderr=True), refresh_per_second=2)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
