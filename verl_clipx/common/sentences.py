"""What the page's sentences are made of: a claim with its numbers, and how numbers are written."""

from typing import Any, NamedTuple

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


def number(value: float, digits: int = 3) -> str:
    """A number with a real minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share in per cent, with two digits below one per cent."""
    return f"{number(100 * value, 2 if abs(value) < HARDLY else 1)}\u202f%"


def between(values: Any) -> str:
    """From the smallest to the largest of the values, a pandas Series or an array, or the one that all are, as text."""
    low, high = (number(value, 2) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
