"""Student's confidence intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from scipy import stats


class Interval(NamedTuple):
    """A mean and its confidence interval.

    Args:
        mean, low, high: in the unit of the values.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval of the mean of independent values; of a single value the interval is the value.

    Args:
        values: at least one.
        level: of confidence.
    """
    numbers = numpy.asarray(values, dtype=float)
    mean, half = float(numbers.mean()), 0.0
    if len(numbers) > 1:
        error = numbers.std(ddof=1) / numpy.sqrt(len(numbers))
        half = float(stats.t.ppf((1 + level) / 2, len(numbers) - 1) * error)
    return Interval(mean, mean - half, mean + half)


def difference_interval(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Interval:
    """Welch's interval of the difference of two means, second minus first.

    Args:
        first, second: independent values, at least two each.
        level: of confidence.
    """
    one, two = numpy.asarray(first, dtype=float), numpy.asarray(second, dtype=float)
    mean = float(two.mean() - one.mean())
    squares = numpy.array([values.var(ddof=1) / len(values) for values in (one, two)])
    if squares.sum() == 0:
        return Interval(mean, mean, mean)
    freedom = squares.sum() ** 2 / (squares**2 / numpy.array([len(one) - 1, len(two) - 1])).sum()
    half = float(stats.t.ppf((1 + level) / 2, freedom) * numpy.sqrt(squares.sum()))
    return Interval(mean, mean - half, mean + half)
