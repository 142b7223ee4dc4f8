"""What the commands of `clipx eval` share: consoles, errors, and which metrics a table shows."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from verl_clipx.common.command_line import fail
from verl_clipx.common.terminal import TerminalConsole

console = TerminalConsole()
messages = TerminalConsole(stderr=True)

All = Annotated[bool, typer.Option("--all", help="Show all metrics, not just the five that matter most.")]
_SHOWN = ("avg", "pass", "maj", "length", "truncated")


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Replace the traceback of errors that a user can fix with their message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    except KeyboardInterrupt:
        console.print("interrupted; finished chunks are kept, and the same command continues from there")
        raise typer.Exit(130) from None


def shown_metrics(metrics: Iterable[str], all_metrics: bool) -> list[str]:
    """Return the metrics that a table shows: `avg`, `pass` and `maj` of the most samples, `length` and `truncated`."""
    names = list(metrics)
    if all_metrics:
        return names
    # Of several pass@j the last has the most draws.
    by_kind = {name.partition("@")[0]: name for name in names}
    return [by_kind[kind] for kind in _SHOWN if kind in by_kind]
