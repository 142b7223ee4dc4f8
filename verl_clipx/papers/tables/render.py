"""Writes a table with its expected and measured numbers in Markdown."""

from collections import Counter
from collections.abc import Iterator, Mapping
from string import ascii_lowercase
from typing import Any

from verl_clipx.papers.tables.definition import Column, Row, Table
from verl_clipx.papers.tables.page import Cell, Page, printed
from verl_clipx.papers.tables.significance import significance_page


def render(table: Table, results: Mapping[str, Any] | None) -> str:
    """Write a table.

    Args:
        results: from `collect`; None for only the expected numbers.

    Returns:
        The text. Cells without a run have no measured number. If methods were compared with a baseline, a table of
        their differences follows.
    """
    pages = [build_page(table, results), significance_page(table, results) if results else None]
    return "\n".join(_written(page) for page in pages if page)


def build_page(table: Table, results: Mapping[str, Any] | None) -> Page:
    """Return the texts of a table."""
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


def _written(page: Page) -> str:
    def heading(name: str, marks: tuple[str, ...]) -> str:
        return name.replace("|", "\\|") + "".join(f"<sup>{mark}</sup>" for mark in marks)

    def text(cell: Cell) -> str:
        return "<br>".join(filter(None, (cell.expected, cell.measured and f"**{cell.measured}**")))

    rows = [[heading(name, marks), *map(text, cells)] for name, marks, cells in page.rows]
    head = "| |" + "".join(f" {heading(*column)} |" for column in page.head)
    written = [head, "|---" * (1 + len(page.head)) + "|", *(f"| {' | '.join(cells)} |" for cells in rows)]
    below = [*page.below, *(f"<sup>{mark}</sup> {note}" for mark, note in page.footnotes)]
    return "\n".join([f"### {page.title}", "", *written, *(line for text in below for line in ("", text)), ""])
