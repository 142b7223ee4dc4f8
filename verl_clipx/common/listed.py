"""Lists for the terminal, in which no name is broken over two lines, so that names can be copied."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# The width of a column's two blanks and its line.
BORDER = 3


def print_list(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""):
    """Prints rows as a table, or, if a word would not fit its column, one below the other with each cell on a line.

    Cells are in rich's markup; the first names its row.
    """
    columns = [[Text.from_markup(cell).plain for cell in column] for column in zip(headings, *rows, strict=True)]
    words = [max(len(word) for cell in column for word in ["", *cell.split()]) for column in columns]
    lines = [max(len(line) for cell in column for line in ["", *cell.splitlines()]) for column in columns]
    spare = console.width - sum(words) - BORDER * len(words) - 1
    if spare >= 0:
        table = Table(title=title, caption=caption or None)
        for heading, width in zip(headings, _shared(words, lines, spare), strict=True):
            table.add_column(heading, width=width)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    console.print(f"[italic]{title}[/]", soft_wrap=True)
    for first, *others in rows:
        console.print(f"[bold]{first}[/]", soft_wrap=True)
        for heading, cell in zip(headings[1:], others, strict=True):
            if cell:
                console.print(f"    {heading}: {', '.join(cell.splitlines())}", soft_wrap=True)
    if caption:
        console.print(f"[italic]{caption}[/]", soft_wrap=True)


def _shared(least: Sequence[int], wanted: Sequence[int], spare: int) -> list[int]:
    """Returns widths from the least to the wanted ones: columns that want more share the spare width evenly."""
    widths = list(least)
    by_want = sorted(range(len(widths)), key=lambda column: wanted[column] - least[column])
    for place, column in enumerate(by_want):
        more = min(wanted[column] - least[column], spare // (len(by_want) - place))
        widths[column] += more
        spare -= more
    return widths
