"""The parts of the page's sentences: a claim with its numbers, and how numbers are written."""

import math
from typing import NamedTuple

# Shares below this are written in per cent with two digits after the point.
SMALL_SHARE = 0.01


class Finding(NamedTuple):
    """A claim and what it rests on.

    Args:
        head: the claim, one sentence.
        text: the numbers that it rests on, in whole sentences.
    """

    head: str
    text: str


def number(value: float, low: float | None = None, high: float | None = None, *, digits: int = 3) -> str:
    """Write a number and, if it has one, its interval, as in `−0.120 [−0.310, 0.070]`; NaN is a dash.

    Args:
        value: the number.
        low, high: the ends of its interval: both, or neither.
        digits: how many digits each number has after the point.
    """
    if math.isnan(value):
        return "–"
    interval = "" if low is None else f" [{number(low, digits=digits)}, {number(high, digits=digits)}]"
    return f"{value:.{digits}f}".replace("-", "−") + interval


def percent(value: float, low: float | None = None, high: float | None = None, *, digits: int | None = None) -> str:
    """Write a share in per cent and, if it has one, its interval.

    Args:
        value: the share.
        low, high: the ends of its interval, as shares: both, or neither.
        digits: how many digits each number has after the point; by default 2 if the share is below 1 %, else 1.
    """
    if digits is None:
        digits = 2 if abs(value) < SMALL_SHARE else 1
    low_end = None if low is None else 100 * low
    high_end = None if high is None else 100 * high
    return f"{number(100 * value, low_end, high_end, digits=digits)}\u202f%"
