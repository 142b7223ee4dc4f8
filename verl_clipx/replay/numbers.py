"""Numbers of a replay: exact, or with an interval, and how they are written."""

import math
from typing import NamedTuple


class Number(NamedTuple):
    """A number and the ends of its interval, None where it is exact or has none."""

    value: float
    low: float | None = None
    high: float | None = None


def percent(number: Number) -> str:
    """A share in percent, with its interval."""
    scaled = Number(*(None if value is None else 100 * value for value in number))
    return f"{plain(scaled, 2)} %"


def plain(number: Number, places: int = 3) -> str:
    """A number with its interval."""
    if number.value is None or math.isnan(number.value):
        return "–"
    interval = "" if number.low is None else f" [{number.low:.{places}f}, {number.high:.{places}f}]"
    return f"{number.value:.{places}f}{interval}"
