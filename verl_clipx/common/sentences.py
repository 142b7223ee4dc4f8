"""What the page's sentences are made of: a claim with its numbers, and how numbers are written."""

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


def number(value: float, digits: int = 3) -> str:
    """A number with a real minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share in per cent, with two digits below one per cent."""
    return f"{number(100 * value, 2 if abs(value) < HARDLY else 1)}\u202f%"
