"""Long runs in figures: the median of each window of steps, and a band of its quantiles."""

from math import ceil
from typing import TypeVar

import numpy
import pandas
from matplotlib.axes import Axes

# A log of up to so many steps is drawn step by step, a longer one in as many windows at most.
MOST_STEPS = 120
# Up to this many points are marked one by one, and up to this many shares are drawn as separate bars.
MOST_MARKS = 60

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9

Values = TypeVar("Values", pandas.Series, pandas.DataFrame)


def take_windows(values: Values, quantile: float = MIDDLE) -> Values:
    """Returns a quantile of each window, at its middle step, or the values themselves where each step has a place."""
    window = ceil(len(values) / MOST_STEPS)
    if window < 2:
        return values
    groups = numpy.arange(len(values)) // window
    steps = pandas.Series(values.index, dtype=float).groupby(groups).mean()
    return values.groupby(groups).quantile(quantile).set_axis(steps)


def curve(axes: Axes, values: pandas.Series, colour: str, **line) -> pandas.Series:
    """Draws a metric over steps, and returns its line.

    Args:
        line: matplotlib's options for it.
    """
    low, middle, high = (take_windows(values, quantile) for quantile in (LOW, MIDDLE, HIGH))
    if len(middle) < len(values):
        axes.fill_between(middle.index, low, high, color=colour, alpha=0.15, lw=0)
    marks = {"marker": "o", "markersize": 3} if len(values) <= MOST_MARKS else {}
    axes.plot(middle.index, middle, color=colour, **marks, **line)
    return middle
