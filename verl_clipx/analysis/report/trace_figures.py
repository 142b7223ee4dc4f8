"""The figure of traced tokens: a mark for each, since few are clipped and a density would hide these."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_clipx.analysis.report.drawing import Panel, figure
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, INK, SOFT
from verl_clipx.analysis.report.tokens import BINS, TokenSpread
from verl_clipx.analysis.runs.traced import ABOVE, BELOW, GRPO_HIGH, GRPO_LOW, HIGH, KEPT, LOW, NONE, OUT

# The height of a line of counts above the axes, in CSS pixels.
COUNT_LINE = 14
# The height of the row of a bin, and half the height of the box in it that shows the bounds, in CSS pixels.
ROW = 58
HALF_BOX = 24
# How far from the middle of its row a token's mark may stand, in CSS pixels.
SCATTER = 21
# The axis of ratios ends at a ratio between these.
SHORTEST_AXIS = 1.5
LONGEST_AXIS = 3.0
# The axis ends at this multiple of the largest ratio that it should reach.
HEADROOM = 1.05


class Mark(NamedTuple):
    """How a token is drawn.

    Args:
        shape: the marker, as matplotlib names it.
        size: its area in square CSS pixels.
        face: the colour of its face.
        edge: the colour of its edge.
        alpha: how opaque it is, from 0 to 1.
    """

    shape: str
    size: int
    face: str
    edge: str
    alpha: float = 1.0


# From each event to the mark of its tokens. The later ones lie on top: they are fewer, and what the figure is about.
MARKS = {
    NONE: Mark("o", size=10, face="white", edge="#a8a8a8"),
    KEPT: Mark("o", size=11, face=INK, edge="none", alpha=0.5),
    ABOVE: Mark("o", size=20, face="white", edge=INK),
    BELOW: Mark("o", size=20, face="white", edge=INK),
    LOW: Mark("v", size=38, face=CLIPPED_LOW, edge="white"),
    HIGH: Mark("^", size=38, face=CLIPPED_HIGH, edge="white"),
    OUT: Mark("X", size=28, face="white", edge=SOFT),
}
# In matplotlib's order of drawing, the first of them is above bounds and grid.
LOWEST_MARK = 3


def draw_spreads(spreads: Sequence[TokenSpread]) -> list[Panel]:
    """Draw a figure for each setting: its tokens' ratios by probability bin, with the bounds. All have equal axes."""
    reach = max((spread.reach for spread in spreads), default=0.0)
    right = min(max(SHORTEST_AXIS, HEADROOM * reach), LONGEST_AXIS)
    return [
        Panel(
            name=f"spread_{index}",
            title=spread.title,
            description=_describe(spread),
            drawing=_draw_spread(spread, right),
        )
        for index, spread in enumerate(spreads)
    ]


def _describe(spread: TokenSpread) -> str:
    """Describe a figure for those who can't see it."""
    return (
        f"Ratios of {spread.label} by probability, and median bounds: {spread.clipped_high} tokens clipped high, "
        f"{spread.clipped_low} low, {spread.outside} outside the bounds with a gradient."
    )


def _draw_spread(spread: TokenSpread, right: float) -> Figure:
    """Draw a mark for each token at its ratio, in the row of its probability bin; `right` ends the axis of ratios."""
    top = 3 * COUNT_LINE + 12
    drawing, (axes,) = figure(top + BINS * ROW + 58, left=66, top=top)
    middle_of_bin = [number * ROW + ROW / 2 for number in range(BINS)]
    if spread.bounds is not None:
        for number, bounds in spread.bounds.iterrows():
            _draw_box(axes, middle_of_bin[number], max(0.0, bounds.low), min(bounds.high, right), spread.colour)
    heights = pandas.Series(0.0, index=spread.drawn.index)
    for number, middle in enumerate(middle_of_bin):
        in_bin = spread.drawn.bin == number
        heights[in_bin] = middle + _scatter(int(in_bin.sum()))
    _draw_marks(axes, spread.drawn.ratio.clip(upper=right), heights, spread.drawn.event)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axvline(bound, color=GRPO, lw=1)
    axes.set_ylim(BINS * ROW, 0)
    axes.set_xlim(0, right)
    axes.set_yticks(middle_of_bin, [f"{number / BINS:g}–{(number + 1) / BINS:g}" for number in range(BINS)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("probability p when sampled", labelpad=2)
    axes.set_xlabel("ratio r = probability now / when sampled")
    _write_counts(axes, spread)
    return drawing


def _scatter(count: int) -> numpy.ndarray:
    """Return how far below or above the middle of their row `count` marks stand, (count,).

    They look scattered, which keeps most of the marks apart, but are the same each time the tokens are drawn.
    """
    # The factor is no simple multiple of π, so that the values do not repeat.
    return SCATTER * numpy.sin(12.9898 * numpy.arange(count))


def _draw_box(axes: Axes, middle: float, low: float, high: float, colour: str) -> None:
    """Draw the bounds of a bin as a box in its row, whose middle is at a height on the axes."""
    axes.fill_between([low, high], middle - HALF_BOX, middle + HALF_BOX, color=colour, alpha=0.12, lw=0)
    axes.vlines([low, high], middle - HALF_BOX, middle + HALF_BOX, color=colour, lw=1.5)


def _draw_marks(axes: Axes, ratios: pandas.Series, heights: pandas.Series, events: pandas.Series) -> None:
    """Draw the tokens' marks, those of an event on top of those of the events before it in MARKS.

    Args:
        axes: where they are drawn.
        ratios: the ratio of each token.
        heights: the height of each token's mark on the axes.
        events: what happened to each token, which chooses its mark.
    """
    for layer, (event, mark) in enumerate(MARKS.items(), LOWEST_MARK):
        has_event = events == event
        axes.scatter(
            ratios[has_event],
            heights[has_event],
            marker=mark.shape,
            s=mark.size,
            lw=0.8,
            zorder=layer,
            facecolor=mark.face,
            edgecolor=mark.edge,
            alpha=mark.alpha,
        )


def _write_counts(axes: Axes, spread: TokenSpread) -> None:
    """Write above a panel how many tokens lost their gradient, and how many outside the bounds have one.

    Each count has a line of its own, so that no number of digits and no browser's font makes two of them overlap.
    """
    outside = f"{spread.outside} tokens outside the bounds have a gradient"
    if spread.outside == 1:
        outside = "1 token outside the bounds has a gradient"
    lines = (
        (f"▲ {_say_lost(spread.clipped_high)} (ratio too high)", CLIPPED_HIGH, "bold"),
        (f"▼ {_say_lost(spread.clipped_low)} (ratio too low)", CLIPPED_LOW, "bold"),
        (f"○ {outside}", SOFT, "normal"),
    )
    # From the lowest line to the highest.
    for place, (text, colour, weight) in enumerate(reversed(lines)):
        axes.annotate(
            text,
            (0, 1),
            xycoords=("figure fraction", "axes fraction"),
            xytext=(0, 8 + place * COUNT_LINE),
            textcoords="offset points",
            color=colour,
            weight=weight,
        )


def _say_lost(tokens: int) -> str:
    """Say how many tokens lost their gradient."""
    if tokens == 1:
        return "1 token lost its gradient"
    return f"{tokens} tokens lost their gradient"
