"""Long runs in figures: the median of each window of steps, and a band of its quantiles."""

from collections.abc import Sequence
from typing import TypeVar

import pandas
from matplotlib.axes import Axes

from verl_clipx.runs.settings import Setting

# A run of up to MOST_STEPS steps is drawn step by step, a longer one in at most MOST_WINDOWS windows of steps.
MOST_STEPS = 120
MOST_WINDOWS = 60
# Up to this many points are marked one by one, and up to this many shares are drawn as separate bars.
MOST_MARKS = 60

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9

Values = TypeVar("Values", pandas.Series, pandas.DataFrame)


def window_of(settings: Sequence[Setting]) -> int:
    """How many steps each window has, the same in all figures of a page; 1: every step is drawn."""
    logs = [run.log.index for setting in settings for run in setting.runs]
    if max(map(len, logs)) <= MOST_STEPS:
        return 1
    longest, window = max(int(steps[-1]) for steps in logs), 5
    while longest > window * MOST_WINDOWS:
        # 5, 10, 20, 50, 100, …
        window = window * 5 // 2 if str(window)[0] == "2" else window * 2
    return window


def take_windows(values: Values, window: int, quantile: float = MIDDLE) -> Values:
    """A quantile of each window's values, at the window's middle step; of windows of one step, the values by step."""
    if window == 1:
        return values
    of_windows = values.groupby((values.index - 1).to_numpy().clip(min=0) // window).quantile(quantile)
    return of_windows.set_axis(of_windows.index * window + (window + 1) / 2)


def curve(axes: Axes, values: pandas.Series, window: int, colour: str, **line) -> pandas.Series:
    """Draws a metric over steps, and returns its line: the steps themselves, or the windows' medians in their band.

    Args:
        line: matplotlib's options for it.
    """
    middle = take_windows(values, window)
    if window > 1:
        low, high = (take_windows(values, window, quantile) for quantile in (LOW, HIGH))
        axes.fill_between(middle.index, low, high, color=colour, alpha=0.15, lw=0)
    axes.plot(middle.index, middle, color=colour, **line)
    return middle


def marks(values: pandas.Series, window: int) -> dict:
    """Matplotlib's options for the points of a short line; none for a long one."""
    return {"marker": "o", "markersize": 3} if window == 1 and len(values) <= MOST_MARKS else {}


def describe_windows(window: int) -> str:
    """What a caption says about the windows."""
    if window == 1:
        return "Each point is a step; nothing is smoothed. "
    return (
        f"A line is the median of {window} steps, and its band holds the middle 80\u202f% of them; "
        "metrics.csv has every step. "
    )
