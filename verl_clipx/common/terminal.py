"""The console that every command prints with: text from data or files cannot control the terminal."""

import contextlib
import errno
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# How much wider than its text a column of a table is: two blanks and a line.
BORDER = 3

# Sequences that set colours and move the cursor; control characters other than tabs and line ends; marks that reverse
# the direction of a line; lone surrogates, which no terminal can encode.
_STEERING = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Return a text without what could control a terminal (ECMA-48, Unicode Standard Annex #9)."""
    return _STEERING.sub("", text)


class TerminalConsole(Console):
    """rich's console, which prints only harmless text, whatever it is given; its own styles stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of something that is printed; see `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            # rich's own control codes, which move the cursor, come as separate segments.
            yield segment if segment.control else segment._replace(text=harmless(segment.text))

    def print_line(self, text: str) -> None:
        """Print a text as it is, without rich's markup and colours, and with lines of any length unbroken."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_row(self, text: str) -> None:
        """Print a text as `print_line` does; on a terminal, broken at blanks and indented from the second line on."""
        if self.is_terminal:
            text = textwrap.fill(
                text, self.width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
            )
        self.print_line(text)

    def print_list(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """Print rows as a table or, if a word would not fit its column, as a list with each cell on a line.

        No word is broken over two lines, so that names can be copied.

        Args:
            title: what stands above the rows.
            headings: the name of each column.
            rows: the cells of each row, in rich's markup. The first cell is the row's name.
            caption: what stands below the rows; empty for nothing.
        """
        # For each column, the number of characters of its longest word and of its longest line.
        longest_words = []
        longest_lines = []
        for column in zip(headings, *rows, strict=True):
            text = "\n".join(Text.from_markup(cell).plain for cell in column)
            longest_words.append(max(map(len, text.split()), default=0))
            longest_lines.append(max(map(len, text.splitlines()), default=0))
        spare = self.width - sum(longest_words) - BORDER * len(longest_words) - 1
        if spare >= 0:
            table = Table(title=title, caption=caption or None)
            for heading, width in zip(headings, shared_widths(longest_words, longest_lines, spare), strict=True):
                table.add_column(heading, width=width)
            for row in rows:
                table.add_row(*row)
            self.print(table)
            return
        self.print(f"[italic]{title}[/]", soft_wrap=True)
        for first, *others in rows:
            self.print(f"[bold]{first}[/]", soft_wrap=True)
            for heading, cell in zip(headings[1:], others, strict=True):
                if cell:
                    self.print(f"    {heading}: {', '.join(cell.splitlines())}", soft_wrap=True)
        if caption:
            self.print(f"[italic]{caption}[/]", soft_wrap=True)


def shared_widths(least: Sequence[int], wanted: Sequence[int], spare: int) -> list[int]:
    """Return the widths of columns, which share the spare width evenly, but get no more than they want.

    Args:
        least: the least width of each column, in characters.
        wanted: the width that each column wants, at least the least one.
        spare: how many characters there are beside the least widths.
    """
    widths = list(least)
    # Columns that want little come first. What they leave is shared by the others.
    by_want = sorted(range(len(widths)), key=lambda column: wanted[column] - least[column])
    for place, column in enumerate(by_want):
        columns_left = len(by_want) - place
        more = min(wanted[column] - least[column], spare // columns_left)
        widths[column] += more
        spare -= more
    return widths


@contextlib.contextmanager
def deferring_warnings(console: Console) -> Iterator[None]:
    """Holds back warnings within the block and prints each of them once at its end.

    Every UserWarning is printed. Warnings of other categories are printed if Python's filters let them through.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught):
                console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_plain(text: str) -> None:
    """Print a text as it is, for other programs to read: not wrapped, not styled, and at once."""
    print(harmless(text), flush=True)


def with_whole_output(command: Callable[[], None]) -> None:
    """Run a command; if standard output is full or was closed by its reader, ends with a message and exit code 1."""
    # Python has no stream where the caller closed one; a file opened later would take its number.
    closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
            if closed:
                raise OSError(errno.EBADF, "standard output is closed")
    except OSError as error:
        if error.filename is not None:
            raise
        # Python flushes standard output when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"clipx: its output could not be written: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(1) from None
