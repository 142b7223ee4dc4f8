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
    pages = [build_page(table, results)]
    if results:
        differences = significance_page(table, results)
        if differences is not None:
            pages.append(differences)
    return "\n".join(_written(page) for page in pages)


def build_page(table: Table, results: Mapping[str, Any] | None) -> Page:
    """Return the texts of a table; the arguments are those of `render`."""
    cells = {(cell["row"], cell["column"]): cell for cell in results["cells"]} if results else {}
    # Each cell says its number of seeds if the cells do not all have the same.
    seed_counts = {len(cell["seeds"]) for cell in cells.values() if cell.get("interval") and cell["seeds"]}
    says_seeds = len(seed_counts) > 1

    notes = table.footnotes
    notes_with_mark = [note for note in notes if note.rows or note.columns]
    marked = dict(zip(notes_with_mark, marks(), strict=False))

    def marks_of(name: str, where: str) -> tuple[str, ...]:
        """Return the marks of the footnotes that name a row or a column; `where` is "rows" or "columns"."""
        return tuple(mark for note, mark in marked.items() if name in getattr(note, where))

    def row_of(row: Row) -> list[Cell]:
        """Return the cells of a row."""
        texts = []
        for column in table.columns:
            cell = cells.get((row.name, column.name), {})
            texts.append(_cell(table, row, column, cell, says_seeds=says_seeds))
        return texts

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
    cells = {(cell["row"], cell["column"]): cell for cell in results["cells"]} if results else {}
    cells_with_a_number = []
    for row in table.rows:
        for column in table.columns:
            expected = table.expected(row, column)
            cell = cells.get((row.name, column.name))
            if expected is not None or cell is not None:
                cells_with_a_number.append(
                    {"row": row.name, "column": column.name, "expected": expected, "measured": cell}
                )
    return cells_with_a_number


def _cell(table: Table, row: Row, column: Column, cell: Mapping[str, Any], *, says_seeds: bool) -> Cell:
    """Return the texts of a cell.

    Args:
        table, row, column: the cell's place.
        cell: what was measured, as `collect` returns it; empty without a run.
        says_seeds: whether the cell says how many seeds its interval is over.
    """
    digits = table.digits_of(column)
    expected = table.expected(row, column)
    if "mean" not in cell:
        return Cell(printed(expected, digits), "")
    measured = printed(cell["mean"], digits)
    if cell["low"] is not None:
        measured += f" [{printed(cell['low'], digits)}, {printed(cell['high'], digits)}]"
    if cell["difference"] is not None:
        measured += f" ({printed(cell['difference'], digits, sign='+')})"
    # A model that is only evaluated has no seed.
    if says_seeds and cell["interval"] and cell["seeds"]:
        measured += f", {_seeds(len(cell['seeds']))}"
    return Cell(printed(expected, digits), measured)


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _below(table: Table, results: Mapping[str, Any] | None, cells: list[Mapping[str, Any]]) -> list[str]:
    unit = {"percent": "%", "fraction": "fraction", "seconds": "s", "number": "number"}[table.unit]
    lines = [f"{table.source}. {table.metric[0].upper()}{table.metric[1:]} ({unit})."]
    measured = [cell for cell in cells if "mean" in cell]
    has_expected = any(row.expected for row in table.rows)
    if has_expected and measured:
        lines.append(
            "Each cell: the paper's number; below it the measured one with its 95 % interval and the difference."
        )
    elif has_expected:
        lines.append("The paper's numbers; nothing has been measured.")
    elif not measured:
        lines.append("Nothing has been measured.")
    counts = Counter((len(cell["seeds"]), cell["interval"]) for cell in measured if cell["interval"])
    for (seeds, kind), number in sorted(counts.items()):
        if kind == "questions":
            how = "Student's, over questions"
        elif kind == "seeds":
            how = f"Student's, over {_seeds(seeds)}"
        else:
            how = f"Clopper and Pearson's, exact, of the share of {_seeds(seeds)} that collapsed"
        cells_with_it = "1 cell" if number == 1 else f"{number} cells"
        lines.append(f"95 % intervals of {cells_with_it}: {how}.")
    if results:
        lines += _origin(results)
    return lines


def _origin(results: Mapping[str, Any]) -> list[str]:
    """Say of which runs, versions and commits the numbers are."""
    lines = []
    trained = [run for run in results["runs"] if run["preset"]]
    if trained:
        seeds = sorted({run["seed"] for run in trained if run["seed"] is not None})
        lines.append(f"Runs: {len(trained)}, seeds {', '.join(map(str, seeds)) or 'not recorded'}.")
    versions = set()
    for run in results["runs"]:
        for package, version in run["versions"].items():
            if version is not None:
                versions.add(f"{package} {version}")
    if versions:
        lines.append(f"Versions: {', '.join(sorted(versions))}.")
    commits = Counter(run["commit"] or "not recorded" for run in results["runs"])
    for commit, number in sorted(commits.items()):
        runs = "1 run" if number == 1 else f"{number} runs"
        lines.append(f"Commit of {runs}: {commit}.")
    lines.append(f"Collected at commit {results['collected_with']['commit'] or 'not recorded'}.")
    if results["refused"]:
        lines.append(f"{len(results['refused'])} refused; the results file says why.")
    return lines


def _written(page: Page) -> str:
    """Return a page in Markdown."""

    def heading(name: str, marks: tuple[str, ...]) -> str:
        return name.replace("|", "\\|") + "".join(f"<sup>{mark}</sup>" for mark in marks)

    def text(cell: Cell) -> str:
        """Return a cell: the expected number, and below it the measured one in bold, as far as there are any."""
        texts = [cell.expected] if cell.expected else []
        if cell.measured:
            texts.append(f"**{cell.measured}**")
        return "<br>".join(texts)

    headings = "".join(f" {heading(name, marks)} |" for name, marks in page.head)
    lines = [f"### {page.title}", "", f"| |{headings}", "|---" * (1 + len(page.head)) + "|"]
    for name, marks, cells in page.rows:
        lines.append(f"| {' | '.join([heading(name, marks), *map(text, cells)])} |")
    for paragraph in page.below:
        lines += ["", paragraph]
    for mark, note in page.footnotes:
        lines += ["", f"<sup>{mark}</sup> {note}"]
    return "\n".join([*lines, ""])
