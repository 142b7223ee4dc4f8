"""Reports what the checks found: as results, a table, a last line, an exit code and JSON."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from verl_clipx.common.command_line import finite

Outcome = Literal["pass", "fail", "skip"]

COLOURS = {"pass": "green", "fail": "red", "skip": "yellow"}
WORDS = {"pass": "passed", "fail": "failed", "skip": "skipped"}


@dataclass(frozen=True)
class Measured:
    """What a check measured.

    Args:
        found: a sentence about it, with the tolerance.
    """

    passed: bool
    found: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The outcome of a check.

    Args:
        outcome: pass, fail, or skip if the check could not run here.
        found: what was found, the error, or why the check was skipped.
        seconds: how long it took, including the start of its processes.
        log: the last lines of its processes, if they failed.
    """

    name: str
    outcome: Outcome
    found: str
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    log: tuple[str, ...] = ()


def result_of(name: str, measured: Measured, seconds: float) -> Result:
    """Return the result of a check that ran to its end."""
    return Result(name, "pass" if measured.passed else "fail", measured.found, measured.numbers, seconds)


def tried(name: str, check: Callable[[], Measured]) -> Result:
    """Run a check in this process.

    Returns:
        Its result. An exception is a failure: the first line of its message is what was found, the others are the log.
    """
    started = time.monotonic()
    try:
        measured = check()
    except Exception as error:
        first, *log = str(error).splitlines() or [""]
        seconds = time.monotonic() - started
        return Result(name, "fail", f"{type(error).__name__}: {first}", seconds=seconds, log=tuple(log))
    return result_of(name, measured, time.monotonic() - started)


def counts(results: Sequence[Result]) -> dict[Outcome, int]:
    """Return the number of checks by outcome."""
    return {outcome: sum(result.outcome == outcome for result in results) for outcome in WORDS}


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if at least one check passed and none failed, else 1: if all were skipped, nothing is known."""
    found = counts(results)
    return 0 if found["pass"] and not found["fail"] else 1


def last_line(results: Sequence[Result]) -> str:
    """Say how many checks passed, failed and were skipped."""
    found = counts(results)
    line = ", ".join(f"{number} {WORDS[outcome]}" for outcome, number in found.items())
    return f"{line}: nothing is known about skipped checks" if found["skip"] else line


def line_of(result: Result) -> str:
    """Return a result as a line of text."""
    return f"{result.outcome}: {result.name}, {result.seconds:.0f} s: {result.found}"


def table_of(results: Sequence[Result], title: str) -> Table:
    """Return the results as a table with one row per check."""
    table = Table(title=title)
    for heading in ("", "check", "found", "s"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "s" else "left")
    for result in results:
        mark = f"[{COLOURS[result.outcome]}]{result.outcome}[/]"
        table.add_row(mark, escape(result.name), escape(result.found), f"{result.seconds:.0f}")
    return table


def as_json(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """Return the results and the machine they were found on, as indented JSON."""
    checks = finite([asdict(result) for result in results])
    return json.dumps({"machine": machine, "counts": counts(results), "checks": checks}, indent=2) + "\n"
