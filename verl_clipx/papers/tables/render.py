"""Renders a table with its expected and measured numbers in Markdown."""

from collections import Counter
from collections.abc import Iterator, Mapping
from string import ascii_lowercase
from typing import Any

from verl_clipx.common.statistics.comparison import QUESTIONS
from verl_clipx.papers.tables.collect import SHARE
from verl_clipx.papers.tables.definition import Column, Table, TableRow
from verl_clipx.papers.tables.page import Cell, Page, printed
from verl_clipx.papers.tables.significance import CellKey, significance_page

_UNIT_SIGNS = {"percent": "%", "fraction": "fraction", "seconds": "s", "number": "number"}
"""What is printed for a table's unit."""


def render(table: Table, results: Mapping[str, Any] | None) -> str:
    """Return a table as Markdown.

    Args:
        results: from `collect`; None for only the expected numbers.

    Returns:
        The Markdown. A cell that no run fills shows only the expected number. If the results have comparisons with a
        baseline, a second table with the differences follows.
    """
    pages = [build_page(table, results)]
    if results:
        differences = significance_page(table, results)
        if differences is not None:
            pages.append(differences)
    return "\n".join(_as_markdown(page) for page in pages)


def build_page(table: Table, results: Mapping[str, Any] | None) -> Page:
    """Build the page of a table, before it becomes Markdown.

    Args:
        table, results: as for `render`.
    """
    cells = _cells_by_place(results)
    # If the intervals are over different numbers of seeds, each cell shows its own number.
    seed_counts = {len(cell["seeds"]) for cell in cells.values() if cell.get("interval") and cell["seeds"]}
    shows_seeds = len(seed_counts) > 1

    notes_with_mark = [note for note in table.footnotes if note.rows or note.columns]
    notes_on_table = [note for note in table.footnotes if not note.rows and not note.columns]
    # There are more marks than notes. The rest of the marks is not used.
    note_by_mark = dict(zip(marks(), notes_with_mark, strict=False))

    head = []
    for column in table.columns:
        column_marks = tuple(mark for mark, note in note_by_mark.items() if column.name in note.columns)
        head.append((column.name, column_marks))
    rows = []
    for row in table.rows:
        row_marks = tuple(mark for mark, note in note_by_mark.items() if row.name in note.rows)
        row_cells = []
        for column in table.columns:
            cell = cells.get((row.name, column.name), {})
            row_cells.append(_build_cell(table, row, column, cell, shows_seeds=shows_seeds))
        rows.append((row.name, row_marks, row_cells))
    return Page(
        title=table.title,
        head=head,
        rows=rows,
        below=[*_lines_below(table, results, list(cells.values())), *(note.text for note in notes_on_table)],
        footnotes=[(mark, note.text) for mark, note in note_by_mark.items()],
    )


def marks() -> Iterator[str]:
    """Yield the marks of footnotes: a to z, then aa to zz."""
    yield from ascii_lowercase
    for first in ascii_lowercase:
        for second in ascii_lowercase:
            yield first + second


def cells_of(table: Table, results: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the cells that have an expected or a measured number, as JSON values.

    Args:
        table, results: as for `render`.

    Returns:
        For each cell `row`; `column`; `expected`, the paper's number or None; and `measured`, the cell as `collect`
        returns it, or None.
    """
    cells = _cells_by_place(results)
    cells_with_a_number = []
    for row in table.rows:
        for column in table.columns:
            expected = table.expected(row, column)
            # `collect` returns every cell. One that was not measured has no mean.
            cell = cells.get((row.name, column.name), {})
            measured = cell if "mean" in cell else None
            if expected is not None or measured is not None:
                cells_with_a_number.append(
                    {"row": row.name, "column": column.name, "expected": expected, "measured": measured}
                )
    return cells_with_a_number


def _cells_by_place(results: Mapping[str, Any] | None) -> dict[CellKey, Mapping[str, Any]]:
    """Return the cells of the results by the names of their row and column; empty without results."""
    if not results:
        return {}
    return {(cell["row"], cell["column"]): cell for cell in results["cells"]}


def _build_cell(table: Table, row: TableRow, column: Column, cell: Mapping[str, Any], *, shows_seeds: bool) -> Cell:
    """Return the texts of a cell.

    Args:
        table, row, column: the cell's place.
        cell: the cell as `collect` returns it; empty without results.
        shows_seeds: whether the cell shows the number of seeds that its interval is over.
    """
    digits = table.digits_of(column)
    expected = printed(table.expected(row, column), digits)
    if "mean" not in cell:
        return Cell(plain=expected, bold="")
    measured = printed(cell["mean"], digits)
    if cell["low"] is not None:
        measured += f" [{printed(cell['low'], digits)}, {printed(cell['high'], digits)}]"
    if cell["difference"] is not None:
        measured += f" ({printed(cell['difference'], digits, sign='+')})"
    # A model that is only evaluated has no seed.
    if shows_seeds and cell["interval"] and cell["seeds"]:
        measured += f", {_count_nouns(len(cell['seeds']), 'seed')}"
    return Cell(plain=expected, bold=measured)


def _count_nouns(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 seed" or "2 seeds".

    Args:
        noun: the noun in the singular. An s makes its plural.
    """
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _lines_below(table: Table, results: Mapping[str, Any] | None, cells: list[Mapping[str, Any]]) -> list[str]:
    """Return the lines below a table.

    They say its source and unit, what a cell shows, how the intervals were made, and which runs the numbers are from.

    Args:
        cells: the cells of the results; empty without results.
    """
    metric = table.metric[0].upper() + table.metric[1:]
    lines = [f"{table.source}. {metric} ({_UNIT_SIGNS[table.unit]})."]
    measured = [cell for cell in cells if "mean" in cell]
    has_expected = any(row.expected for row in table.rows)
    # Measured numbers alone need no explanation.
    if has_expected and measured:
        lines.append(
            "Each cell: the paper's number; below it the measured one with its 95 % interval and the difference."
        )
    elif has_expected:
        lines.append("The paper's numbers; nothing has been measured.")
    elif not measured:
        lines.append("Nothing has been measured.")
    # The number of cells with each kind of interval: the number of seeds, and what the interval is over.
    cell_counts: Counter[tuple[int, str]] = Counter()
    for cell in measured:
        if cell["interval"]:
            # An interval over questions is of the same kind for one training and for a model that nothing trains.
            seed_count = 0 if cell["interval"] == QUESTIONS else len(cell["seeds"])
            cell_counts[seed_count, cell["interval"]] += 1
    for (seed_count, interval), cell_count in sorted(cell_counts.items()):
        description = _describe_interval(interval, seed_count)
        lines.append(f"95 % intervals of {_count_nouns(cell_count, 'cell')}: {description}.")
    if results:
        lines += _provenance_lines(results)
    return lines


def _describe_interval(interval: str, seed_count: int) -> str:
    """Return how an interval was made.

    Args:
        interval: what the interval is over, as a cell of the results says it.
        seed_count: the number of seeds that it is over; 0 for an interval over questions.
    """
    if interval == QUESTIONS:
        return "Student's t over questions"
    seeds = _count_nouns(seed_count, "seed")
    if interval == SHARE:
        return f"Clopper and Pearson's exact interval for the share of trainings that collapsed, with {seeds}"
    return f"Student's t over {seeds}"


def _provenance_lines(results: Mapping[str, Any]) -> list[str]:
    """Return the lines on the origin of the numbers.

    They have the trainings with their seeds, the versions, the commits of the trainings and of the collection, and how
    many runs or evaluations were refused.

    Args:
        results: from `collect`.
    """
    lines = []
    # The other runs are models that nothing trained. They are only evaluated, and an evaluation records no commit.
    trainings = [run for run in results["runs"] if run["preset"]]
    if trainings:
        seeds = sorted({run["seed"] for run in trainings if run["seed"] is not None})
        seed_list = ", ".join(str(seed) for seed in seeds) or "not recorded"
        lines.append(f"Trainings: {len(trainings)}, seeds {seed_list}.")
    versions = set()
    for run in results["runs"]:
        for package, version in run["versions"].items():
            if version is not None:
                versions.add(f"{package} {version}")
    if versions:
        lines.append(f"Versions: {', '.join(sorted(versions))}.")
    trainings_by_commit = Counter(run["commit"] or "not recorded" for run in trainings)
    for commit, training_count in sorted(trainings_by_commit.items()):
        lines.append(f"Commit of {_count_nouns(training_count, 'training')}: {commit}.")
    lines.append(f"Collected at commit {results['collected_with']['commit'] or 'not recorded'}.")
    refused_count = len(results["refused"])
    if refused_count == 1:
        lines.append("1 run or evaluation was refused; the results file says why.")
    elif refused_count > 1:
        lines.append(f"{refused_count} runs or evaluations were refused; the results file says why.")
    return lines


def _as_markdown(page: Page) -> str:
    """Return a page in Markdown. It ends with a line break."""
    # The first column has the names of the rows. Its own heading is empty.
    head = "|"
    rule = "|---|"
    for name, footnote_marks in page.head:
        head += f" | {_markdown_heading(name, footnote_marks)}"
        rule += "---|"
    lines = [f"### {page.title}", "", f"{head} |", rule]
    for name, footnote_marks, cells in page.rows:
        texts = [_markdown_heading(name, footnote_marks)]
        texts += [_markdown_cell(cell) for cell in cells]
        lines.append(_markdown_row(texts))
    for paragraph in page.below:
        lines += ["", paragraph]
    for mark, note in page.footnotes:
        lines += ["", f"<sup>{mark}</sup> {note}"]
    return "\n".join(lines) + "\n"


def _markdown_heading(name: str, footnote_marks: tuple[str, ...]) -> str:
    """Return the heading of a row or a column with the marks of its footnotes."""
    return name.replace("|", "\\|") + "".join(f"<sup>{mark}</sup>" for mark in footnote_marks)


def _markdown_cell(cell: Cell) -> str:
    """Return the plain text and, below it, the bold one. Either may be missing."""
    texts = []
    if cell.plain:
        texts.append(cell.plain)
    if cell.bold:
        texts.append(f"**{cell.bold}**")
    return "<br>".join(texts)


def _markdown_row(cells: list[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"
