"""A table as text, before it gets a format."""

from dataclasses import dataclass

MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """What is printed in a cell: nothing where there is nothing."""

    expected: str
    measured: str


@dataclass(frozen=True)
class Page:
    """A table as text, before it gets a format."""

    title: str
    head: list[tuple[str, tuple[str, ...]]]
    """Headings with the marks of their footnotes."""

    rows: list[tuple[str, tuple[str, ...], list[Cell]]]
    """Heading, marks, cells."""

    below: list[str]
    """Lines under the table."""

    footnotes: list[tuple[str, str]]
    """Mark and text."""


def printed(value: float | None, digits: int, sign: str = "-") -> str:
    """A number as it is printed, nothing for None; with `sign` "+" a plus before what is positive."""
    if value is None:
        return ""
    # Without a sign for what rounds to zero.
    value = round(value, digits) + 0.0
    return f"{value:{sign}.{digits}f}".replace("-", MINUS)
