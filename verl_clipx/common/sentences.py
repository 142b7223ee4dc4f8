"""The parts of the page's sentences: a claim with its numbers, and how numbers are written."""

import math
from typing import NamedTuple

# Below this share a percentage has two digits after the point.
HARDLY = 0.01


class Finding(NamedTuple):
    """A claim and what it rests on.

    Args:
        head: the claim, one sentence.
        text: the numbers.
    """

    head: str
    text: str


def number(value: float, low: float | None = None, high: float | None = None, *, digits: int = 3) -> str:
    """Writes a number with a real minus sign, a dash for NaN, and its interval where it has one."""
    if math.isnan(value):
        return "–"
    interval = "" if low is None else f" [{number(low, digits=digits)}, {number(high, digits=digits)}]"
    return f"{value:.{digits}f}".replace("-", "−") + interval


def percent(value: float, low: float | None = None, high: float | None = None, *, digits: int | None = None) -> str:
    """Writes a share in per cent, as `number`; by default with two digits below one per cent, and one from there on."""
    if digits is None:
        digits = 2 if abs(value) < HARDLY else 1
    low_end = None if low is None else 100 * low
    high_end = None if high is None else 100 * high
    return f"{number(100 * value, low_end, high_end, digits=digits)}\u202f%"
