"""The texts of a table, before they are written in Markdown."""

from dataclasses import dataclass

MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """The texts of a cell; a text is empty if there is no number.

    Args:
        plain: in the table of numbers, the expected one; in the table of differences, one that is not significant.
        bold: in the table of numbers, the measured one; in the table of differences, a significant one.
    """

    plain: str
    bold: str


@dataclass(frozen=True)
class Page:
    """The texts of a table."""

    title: str
    head: list[tuple[str, tuple[str, ...]]]
    """Headings of the columns, with the marks of their footnotes."""

    rows: list[tuple[str, tuple[str, ...], list[Cell]]]
    """For each row its heading, the marks of its footnotes, and its cells."""

    below: list[str]
    """Lines below the table."""

    footnotes: list[tuple[str, str]]
    """Mark and text of each footnote."""


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
