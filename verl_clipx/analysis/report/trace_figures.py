"""The figure of traced tokens: dots rather than densities."""

from collections.abc import Sequence

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_clipx.analysis.report.drawing import Panel, figure
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, INK, SOFT
from verl_clipx.analysis.report.tokens import BINS, TokenSpread
from verl_clipx.analysis.runs.traced import ABOVE, BELOW, GRPO_HIGH, GRPO_LOW, HIGH, KEPT, LOW, NONE, OUT

# In CSS pixels: from one line of counts above a panel to the next, of a bin's row, and of half a box of bounds.
COUNT_LINE = 14
ROW = 58
HALF_BOX = 24
# The axis of ratios ends between these.
SHORTEST_AXIS = 1.5
LONGEST_AXIS = 3.0

# Of each event: the marker, its size, face and edge.
MARKS = {
    NONE: ("o", 10, "white", "#a8a8a8"),
    KEPT: ("o", 11, INK, "none"),
    ABOVE: ("o", 20, "white", INK),
    BELOW: ("o", 20, "white", INK),
    LOW: ("v", 38, CLIPPED_LOW, "white"),
    HIGH: ("^", 38, CLIPPED_HIGH, "white"),
    OUT: ("X", 28, "white", SOFT),
}


def draw_spreads(spreads: Sequence[TokenSpread]) -> list[Panel]:
    """Draws the ratio by probability bin, with each setting's bounds and clipped tokens, on equal axes."""
    reach = max((spread.reach for spread in spreads), default=0.0)
    right = min(max(SHORTEST_AXIS, 1.05 * reach), LONGEST_AXIS)
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
    return (
        f"Ratios of {spread.label} by probability, and median bounds: {spread.clipped_high} tokens clipped high, "
        f"{spread.clipped_low} low, {spread.outside} outside the bounds with a gradient."
    )


def _draw_spread(spread: TokenSpread, right: float) -> Figure:
    """Draws a mark for each token at its ratio, in the row of its probability bin; `right` ends the axis of ratios."""
    top = 3 * COUNT_LINE + 12
    drawing, (axes,) = figure(top + BINS * ROW + 58, left=66, top=top)
    middles = [bin * ROW + ROW / 2 for bin in range(BINS)]
    if spread.bounds is not None:
        for bin, bounds in spread.bounds.iterrows():
            _draw_box(axes, middles[bin], max(0.0, bounds.low), min(bounds.high, right), spread.colour)
    places = pandas.Series(0.0, index=spread.drawn.index)
    for bin, middle in enumerate(middles):
        in_bin = spread.drawn.bin == bin
        # Fixed scattering across the line keeps most marks apart.
        places[in_bin] = middle + 21 * numpy.sin(12.9898 * numpy.arange(in_bin.sum()))
    _draw_marks(axes, spread.drawn.ratio.clip(upper=right), places, spread.drawn.event)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axvline(bound, color=GRPO, lw=1)
    axes.set_ylim(BINS * ROW, 0)
    axes.set_xlim(0, right)
    axes.set_yticks(middles, [f"{bin / BINS:g}–{(bin + 1) / BINS:g}" for bin in range(BINS)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("probability p when sampled", labelpad=2)
    axes.set_xlabel("ratio r = probability now / when sampled")
    _write_counts(axes, spread)
    return drawing


def _draw_box(axes: Axes, middle: float, low: float, high: float, colour: str) -> None:
    """Draws the bounds of a bin, on the row around its middle."""
    axes.fill_between([low, high], middle - HALF_BOX, middle + HALF_BOX, color=colour, alpha=0.12, lw=0)
    axes.vlines([low, high], middle - HALF_BOX, middle + HALF_BOX, color=colour, lw=1.5)


def _draw_marks(axes: Axes, ratios: pandas.Series, places: pandas.Series, events: pandas.Series) -> None:
    """Draws the tokens' marks, those of an event above those of the events before it in MARKS.

    Args:
        axes: where they are drawn.
        ratios: of each token, along the axis.
        places: of each token, across it.
        events: what happened to each token, which chooses its mark.
    """
    for order, (event, (marker, size, face, edge)) in enumerate(MARKS.items(), 3):
        rows = events == event
        axes.scatter(
            ratios[rows],
            places[rows],
            marker=marker,
            s=size,
            lw=0.8,
            zorder=order,
            facecolor=face,
            edgecolor=edge,
            alpha=0.5 if event == KEPT else 1,
        )


def _write_counts(axes: Axes, spread: TokenSpread) -> None:
    """Writes above a panel how many tokens lost their gradient, and how many outside the bounds have one.

    Each count has a line of its own, so that no number of digits and no browser's font makes two of them overlap.
    """
    outside = f"{spread.outside} tokens outside the bounds have a gradient"
    if spread.outside == 1:
        outside = "1 token outside the bounds has a gradient"
    lines = (
        (f"▲ {_lost(spread.clipped_high)} (ratio too high)", CLIPPED_HIGH, "bold"),
        (f"▼ {_lost(spread.clipped_low)} (ratio too low)", CLIPPED_LOW, "bold"),
        (f"○ {outside}", SOFT, "normal"),
    )
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


def _lost(tokens: int) -> str:
    """Says how many tokens lost their gradient."""
    if tokens == 1:
        return "1 token lost its gradient"
    return f"{tokens} tokens lost their gradient"
