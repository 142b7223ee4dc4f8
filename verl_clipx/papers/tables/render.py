"""Writes a table with its expected and measured numbers as Markdown, HTML or LaTeX."""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from string import ascii_lowercase
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from verl_clipx.papers.tables.definition import Column, Row, Table
from verl_clipx.papers.tables.page import MINUS, Cell, Page, printed
from verl_clipx.papers.tables.significance import significance_page


def render(table: Table, results: Mapping[str, Any] | None, markup: str) -> str:
    """Write a table.

    Args:
        results: from `collect`; None for only the expected numbers.
        markup: a key of `FORMATS`.

    Returns:
        The text. Cells without a run have no measured number. If methods were compared with a baseline, a table of
        their differences follows.

    Raises:
        ValueError: the format is unknown.
    """
    if markup not in FORMATS:
        raise ValueError(f"--format {markup}: must be one of {', '.join(FORMATS)}")
    pages = [build_page(table, results), significance_page(table, results) if results else None]
    return "\n".join(_written(page, markup) for page in pages if page)


def build_page(table: Table, results: Mapping[str, Any] | None) -> Page:
    """Return the texts of a table, before a format is applied."""
    cells = {(cell["row"], cell["column"]): cell for cell in results["cells"]} if results else {}
    per_cell = len({len(cell["seeds"]) for cell in cells.values() if cell.get("interval") and cell["seeds"]}) > 1

    notes = table.footnotes
    marked = dict(zip((note for note in notes if note.rows or note.columns), marks(), strict=False))

    def marks_of(name: str, where: str) -> tuple[str, ...]:
        return tuple(mark for note, mark in marked.items() if name in getattr(note, where))

    def row_of(row: Row) -> list[Cell]:
        return [_cell(table, row, one, cells.get((row.name, one.name), {}), per_cell) for one in table.columns]

    return Page(
        title=table.title,
        head=[(column.name, marks_of(column.name, "columns")) for column in table.columns],
        rows=[(row.name, marks_of(row.name, "rows"), row_of(row)) for row in table.rows],
        below=[*_below(table, results, list(cells.values())), *(note.text for note in notes if note not in marked)],
        footnotes=[(mark, note.text) for note, mark in marked.items()],
    )


def marks() -> Iterator[str]:
    """Yield a to z, then aa to zz."""
    yield from ascii_lowercase
    yield from (first + second for first in ascii_lowercase for second in ascii_lowercase)


def cells_of(table: Table, results: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return every cell with a number as JSON values: row, column, expected, and what was measured, or None."""
    measured = {(cell["row"], cell["column"]): cell for cell in results["cells"]} if results else {}
    found = []
    for row in table.rows:
        for column in table.columns:
            expected, cell = table.expected(row, column), measured.get((row.name, column.name))
            if expected is not None or cell is not None:
                found.append({"row": row.name, "column": column.name, "expected": expected, "measured": cell})
    return found


def _cell(table: Table, row: Row, column: Column, cell: Mapping[str, Any], per_cell: bool) -> Cell:
    digits, expected = table.digits_of(column), table.expected(row, column)
    if "mean" not in cell:
        return Cell(printed(expected, digits), "")
    measured = printed(cell["mean"], digits)
    if cell["low"] is not None:
        measured += f" [{printed(cell['low'], digits)}, {printed(cell['high'], digits)}]"
    if cell["difference"] is not None:
        measured += f" ({printed(cell['difference'], digits, sign='+')})"
    # A model that is only evaluated has no seed.
    if per_cell and cell["interval"] and cell["seeds"]:
        measured += f", {_seeds(len(cell['seeds']))}"
    return Cell(printed(expected, digits), measured)


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _below(table: Table, results: Mapping[str, Any] | None, cells: list[Mapping[str, Any]]) -> list[str]:
    unit = {"percent": "%", "fraction": "fraction", "seconds": "s", "number": "number"}[table.unit]
    lines = [f"{table.source}. {table.metric[0].upper()}{table.metric[1:]} ({unit})."]
    measured = [cell for cell in cells if "mean" in cell]
    if any(row.expected for row in table.rows):
        lines.append(
            "Each cell: the paper's number; below it the measured one with its 95 % interval and the difference."
            if measured
            else "The paper's numbers; nothing has been measured."
        )
    elif not measured:
        lines.append("Nothing has been measured.")
    counts = Counter((len(cell["seeds"]), cell["interval"]) for cell in measured if cell["interval"])
    for (seeds, kind), number in sorted(counts.items()):
        how = {"questions": "Student's, over questions", "seeds": f"Student's, over {_seeds(seeds)}"}.get(
            kind, f"Clopper and Pearson's, exact, of the share of {_seeds(seeds)} that collapsed"
        )
        lines.append(f"95 % intervals of {'1 cell' if number == 1 else f'{number} cells'}: {how}.")
    if results:
        lines += _origin(results)
    return lines


def _origin(results: Mapping[str, Any]) -> list[str]:
    lines = []
    trained = [run for run in results["runs"] if run["preset"]]
    if trained:
        seeds = sorted({run["seed"] for run in trained if run["seed"] is not None})
        lines.append(f"Runs: {len(trained)}, seeds {', '.join(map(str, seeds)) or 'not recorded'}.")
    pairs = {pair for run in results["runs"] for pair in run["versions"].items()}
    versions = sorted(f"{package} {number}" for package, number in pairs if number is not None)
    if versions:
        lines.append(f"Versions: {', '.join(versions)}.")
    commits = Counter(run["commit"] or "not recorded" for run in results["runs"])
    for commit, number in sorted(commits.items()):
        lines.append(f"Commit of {number} {'run' if number == 1 else 'runs'}: {commit}.")
    lines.append(f"Collected at commit {results['collected_with']['commit'] or 'not recorded'}.")
    if results["refused"]:
        lines.append(f"{len(results['refused'])} refused; the results file says why.")
    return lines


# Text in back quotes, which Markdown sets as code.
_CODE = re.compile("`([^`]+)`")

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    MINUS: "$-$",
    "\u2026": r"\dots{}",
}

# Writes a text in each format; templates/table.<format> writes the table around it.
FORMATS: dict[str, Callable[[str], str]] = {
    "markdown": lambda text: text.replace("|", "\\|"),
    "html": lambda text: _CODE.sub(r"<code>\1</code>", html.escape(text)),
    "latex": lambda text: _CODE.sub(r"\\texttt{\1}", text.translate(str.maketrans(_LATEX_ESCAPES))),
}


def _written(page: Page, markup: str) -> str:
    environment = Environment(
        loader=PackageLoader("verl_clipx.papers.tables"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["text"] = FORMATS[markup]
    return environment.get_template(f"table.{markup}").render(page=page)
