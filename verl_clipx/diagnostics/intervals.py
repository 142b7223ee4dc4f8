"""Student's confidence intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from scipy import stats

from verl_clipx.common.statistics.variance import CONFIDENCE


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval.

    Args:
        mean, low, high: in the unit of the values.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.3f} (no interval, as nothing varies)"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's 95 % interval of the mean of independent values; of equal values or a single one it has no width.

    Args:
        values: at least one.
    """
    numbers = numpy.asarray(values, dtype=float)
    mean, half = float(numbers.mean()), 0.0
    if numpy.ptp(numbers):
        error = numbers.std(ddof=1) / numpy.sqrt(len(numbers))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1) * error)
    return Interval(mean, mean - half, mean + half)
