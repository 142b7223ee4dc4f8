"""Matplotlib figures for the page: drawn for their width in CSS pixels, long runs by windows of steps, text as text."""

import re
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy
import pandas
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_clipx.analysis.report.palette import HAIR, INK, SOFT
from verl_clipx.common.files import replacing

# Every figure fits a telephone; a wide page sets two beside each other. A CSS pixel is a Matplotlib point.
WIDTH = 348

# Logs with more steps than this are drawn in at most this many windows of steps.
MOST_STEPS = 120
# Each point of a curve has a mark, and each share a bar of its own, if there are no more than this many.
MOST_MARKS = 60

# The quantiles of a window that are drawn: the line is the middle one, the band lies between the others.
LOW = 0.1
MIDDLE = 0.5
HIGH = 0.9

Values = TypeVar("Values", pandas.Series, pandas.DataFrame)

STYLE = Path(__file__).with_name("page.mplstyle")
STYLE_COLOURS = {
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), SOFT),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), HAIR),
}


class Panel(NamedTuple):
    """A figure of the page's width.

    Args:
        name: the name of its files, without an ending.
        title: what stands above it.
        description: a text for those who cannot see it.
        drawing: the figure itself.
    """

    name: str
    title: str
    description: str
    drawing: Figure


def figure(
    height: float, *, rows: int = 1, columns: int = 1, left: float = 44, top: float = 24, bottom: float = 38, **shared
) -> tuple[Figure, list[Axes]]:
    """Make a figure of the page's width.

    Args:
        height: the height of the figure, in CSS pixels.
        rows, columns: how many rows and columns of axes it has.
        left, top, bottom: the margins around all axes, in CSS pixels.
        shared: matplotlib's options `sharex` and `sharey`.

    Returns:
        The figure, and its axes row by row.
    """
    drawing = Figure(figsize=(WIDTH / 72, height / 72))
    all_axes = drawing.subplots(rows, columns, squeeze=False, **shared)
    drawing.subplots_adjust(
        left=left / WIDTH, right=1 - 12 / WIDTH, top=1 - top / height, bottom=bottom / height, hspace=0.42, wspace=0.16
    )
    return drawing, list(all_axes.flat)


def style():
    """Return a context in which figures are made and saved in the page's style."""
    return matplotlib.rc_context(STYLE_COLOURS, STYLE)


def summarise_windows(values: Values, quantile: float = MIDDLE) -> Values:
    """Return a quantile of the values in each window of steps; the values themselves for at most MOST_STEPS steps.

    Args:
        values: by step, or a frame with a row for each step.
        quantile: the quantile, from 0 to 1.

    Returns:
        One value, or one row, for each window, by the window's middle step: of two middle steps the earlier one.
    """
    steps_per_window = ceil(len(values) / MOST_STEPS)
    if steps_per_window < 2:
        return values
    middle_places: list[int] = []
    for first_place in range(0, len(values), steps_per_window):
        last_place = min(first_place + steps_per_window, len(values)) - 1
        middle_places.append((first_place + last_place) // 2)
    windows = numpy.arange(len(values)) // steps_per_window
    return values.groupby(windows).quantile(quantile).set_axis(values.index[middle_places])


def curve(axes: Axes, values: pandas.Series, colour: str, **line) -> pandas.Series:
    """Draw a metric over steps: in a long log the median of each window, with a band of the middle 80 %.

    Args:
        axes: the axes.
        values: the metric by step.
        colour: the colour of the line and the band.
        line: matplotlib's options for the line.

    Returns:
        The values of the line, by step.
    """
    middle = summarise_windows(values, MIDDLE)
    if len(middle) < len(values):
        low = summarise_windows(values, LOW)
        high = summarise_windows(values, HIGH)
        axes.fill_between(middle.index, low, high, color=colour, alpha=0.15, lw=0)
    marks = {"marker": "o", "markersize": 3} if len(values) <= MOST_MARKS else {}
    axes.plot(middle.index, middle, color=colour, **marks, **line)
    return middle


def widen_left_margin(drawing: Figure) -> None:
    """Widen a figure's left margin if the label of a tick would begin outside the figure."""
    drawing.draw_without_rendering()
    begins = min(axes.get_tightbbox().x0 for axes in drawing.axes)
    if begins < 0:
        drawing.subplots_adjust(left=drawing.subplotpars.left - begins / drawing.bbox.width)


# The formats of a figure, each with matplotlib's options.
FORMATS: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 144}}


def save(drawing: Figure, folder: Path, name: str) -> None:
    """Write a figure as SVG and PNG, with a left margin in which the labels of its ticks have room."""
    widen_left_margin(drawing)
    for kind, options in FORMATS.items():
        with replacing(folder / f"{name}.{kind}") as partial:
            drawing.savefig(partial, format=kind, **options)


def inline(text: str, name: str, description: str) -> Markup:
    """Return an SVG that fits into the page: with the page's fonts, and without metadata.

    Args:
        text: the file that matplotlib wrote.
        name: a name that no other figure of the page has. The ids within the SVG get it as a prefix.
        description: a text for screen readers.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px) [^;\"]+", _without_family, text)
    # Only coordinates are rounded: the label of a tick is text.
    text = re.sub(r'\b(d|x|y|transform)="[^"]*"', _rounded, text)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()
    head = Markup(
        '<svg viewBox="0 0 {} {}" style="max-width:{}px" role="img" aria-label="{}" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg">'
    ).format(width, height, width, description)
    return head + Markup(text[text.index(">") + 1 :])


# A number with more than two digits after the point.
_LONG = re.compile(r"(-?\d+\.\d{2})\d+")


def _rounded(coordinates: re.Match) -> str:
    """Return an attribute of an SVG with at most two digits after the point of each number."""
    return _LONG.sub(r"\1", coordinates[0])


def _without_family(font: re.Match) -> str:
    """Return the size and the weight of a font, so that its family is the page's."""
    weight = font[1]
    size = font[2]
    if "bold" in weight or "700" in weight:
        return f"font-size: {size}; font-weight: 700"
    return f"font-size: {size}"
