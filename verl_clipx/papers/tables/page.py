"""The texts of a table, before they are written in Markdown."""

from dataclasses import dataclass

MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """The two texts of a cell. A text without a number is empty.

    Args:
        plain: the expected number, or, in the table of differences, a difference that is not significant.
        bold: the measured number, or, in the table of differences, a significant difference.
    """

    plain: str
    bold: str


@dataclass(frozen=True)
class Page:
    """The texts of a table.

    Args:
        head: for each column its heading and the marks of its footnotes.
        rows: for each row its heading, the marks of its footnotes, and its cells.
        below: the lines below the table.
        footnotes: for each footnote its mark and its text.
    """

    title: str
    head: list[tuple[str, tuple[str, ...]]]
    rows: list[tuple[str, tuple[str, ...], list[Cell]]]
    below: list[str]
    footnotes: list[tuple[str, str]]


def printed(value: float | None, digits: int, sign: str = "-") -> str:
    """Return a number as it is printed, or "" for None.

    Args:
        digits: digits after the decimal point.
        sign: "+" puts a plus sign before positive numbers.
    """
    if value is None:
        return ""
    # Adding 0 removes the sign of a number that rounds to zero.
    value = round(value, digits) + 0.0
    return f"{value:{sign}.{digits}f}".replace("-", MINUS)
