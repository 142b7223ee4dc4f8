"""Figures of the runs' logs.

Bars that point up show what lies above the upper bound, bars that point down what lies below the lower bound.
"""

import copy
import textwrap
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, TypeVar

import numpy
import pandas
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_clipx.analysis.report.charts import (
    BinnedBounds,
    BoundsByStep,
    Chart,
    ChartLine,
    ClippedShares,
    FloorByStep,
    MassShares,
    SearchedBounds,
)
from verl_clipx.analysis.report.drawing import (
    HIGH,
    LOW,
    MOST_MARKS,
    MOST_STEPS,
    Panel,
    curve,
    figure,
    summarise_windows,
)
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, HAIR, INK, SOFT
from verl_clipx.analysis.runs.traced import GRPO_HIGH, GRPO_LOW
from verl_clipx.common.sentences import percent

# How many bins of a setting are drawn at most.
MOST_BINS = 9
BINS_A_ROW = 3
# The heights of figures, in CSS pixels.
CHART_HEIGHT = 236
BARS_HEIGHT = 220
SEARCH_HEIGHT = 220
SEARCH_WITH_SHARES_HEIGHT = 330
# The height of a row of bins, and that of the margins around all rows, in CSS pixels.
BIN_ROW_HEIGHT = 132
BIN_MARGINS = 46
# A left margin in which the labels of shares have room, in CSS pixels.
SHARE_MARGIN = 52
# The left margin of axes with ratios, whose labels are short, in CSS pixels.
RATIO_MARGIN = 30
# An axis ends at this multiple of the largest value on it.
HEADROOM = 1.08
# An axis of ratios ends at this ratio or above it.
LEAST_TOP_OF_RATIOS = 2.0
# On the side with the shorter bars, the axis has room for at least this share of the longest bar.
LEAST_ROOM = 0.15
# The length that is assumed for the longest bar where all are shorter.
SHORTEST_BAR = 1e-4
# The styles of the metrics of a panel, in turn.
LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
DASHED = (0, (3, 2))
# How many held-out rewards are drawn at most: in a figure as narrow as a column, more diamonds would overlap.
MOST_DIAMONDS = 24
# How many names a legend has at most, and how many characters a line of it. A larger legend would cover the labels of
# the axes.
MOST_NAMES = 8
NAME_CHARACTERS = 32

Item = TypeVar("Item")


# --- Curves ----------------------------------------------------------------------------------------------------------


def draw_charts(charts: Sequence[Chart]) -> list[Panel]:
    """Draw each chart in a panel."""
    return [
        Panel(name=chart.name, title=chart.title, description=chart.description, drawing=_draw_chart(chart))
        for chart in charts
    ]


def _draw_chart(chart: Chart) -> Figure:
    """Draw a chart's lines on one pair of axes."""
    drawing, (axes,) = figure(CHART_HEIGHT, left=SHARE_MARGIN, top=12)
    for line in chart.lines:
        _draw_line(axes, line)
    if chart.from_zero:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0, low), high)
    if chart.in_percent:
        axes.yaxis.set_major_formatter(_percent_of_tick)
    step_axis(axes)
    _name_lines(axes)
    return drawing


def _draw_line(axes: Axes, line: ChartLine) -> None:
    """Draw the mean over the runs, a band from the lowest run to the highest, and the errors.

    In a long log the curve has a point at the middle step of each window, as `summarise_windows` has it. Only the
    errors of these steps are drawn.
    """
    by_run = summarise_windows(line.by_run)
    if by_run.shape[1] > 1:
        axes.fill_between(by_run.index, by_run.min(axis=1), by_run.max(axis=1), color=line.colour, alpha=0.15, lw=0)
    style = LINE_STYLES[line.line_style % len(LINE_STYLES)]
    mean = curve(axes, line.by_run.mean(axis=1), line.colour, ls=style, label=line.name)
    errors = line.errors[line.errors.index.isin(mean.index)]
    if len(errors):
        middle = mean[errors.index]
        axes.vlines(errors.index, middle - errors, middle + errors, line.colour, lw=1)
    _draw_diamonds(axes, line)


def _draw_diamonds(axes: Axes, line: ChartLine) -> None:
    """Draw the held-out rewards of a run, at most MOST_DIAMONDS, evenly spaced, with the last one among them."""
    every = max(1, ceil(len(line.held_out) / MOST_DIAMONDS))
    for point in line.held_out[::-every]:
        if point.reward.low is not None:
            axes.vlines(point.step, point.reward.low, point.reward.high, color=line.colour, lw=1)
        axes.plot(point.step, point.reward.mean, "D", color="white", mec=line.colour, ms=6, mew=1.4)


def _name_lines(axes: Axes) -> None:
    """Add a legend if the lines have different names.

    Lines of the same name, which are those of one metric in several settings, share an entry. The entry has the style
    of its lines and, if they differ in colour, no setting's colour. Long names are wrapped. Of more than MOST_NAMES
    names, only some are listed.
    """
    handles, labels = axes.get_legend_handles_labels()
    handle_of_name: dict[str, Artist] = {}
    for name, handle in zip(labels, handles, strict=True):
        first_handle = handle_of_name.setdefault(name, handle)
        if handle.get_color() != first_handle.get_color():
            without_colour = copy.copy(first_handle)
            without_colour.set_color(INK)
            handle_of_name[name] = without_colour
    if len(handle_of_name) < 2:
        return
    names = choose_evenly(list(handle_of_name), MOST_NAMES)
    legend = axes.legend(
        [handle_of_name[name] for name in names],
        [textwrap.fill(name, NAME_CHARACTERS) for name in names],
    )
    for text in legend.get_texts():
        # Browsers give a line of text more height than Matplotlib does.
        text.set_linespacing(1.4)


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, evenly spaced, with the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = numpy.linspace(0, len(items) - 1, most).astype(int)
    return [items[place] for place in places]


# --- Bounds ----------------------------------------------------------------------------------------------------------


def draw_bounds(bounds_of_settings: Sequence[BinnedBounds | SearchedBounds]) -> list[Panel]:
    """Draw the bounds that each setting used, over steps."""
    panels = []
    for index, bounds in enumerate(bounds_of_settings):
        drawing = _draw_bins(bounds) if isinstance(bounds, BinnedBounds) else _draw_search(bounds)
        panels.append(
            Panel(
                name=f"bounds_{index}",
                title=bounds.label,
                description=f"Bounds of {bounds.label} over steps, against 0.8 to 1.2.",
                drawing=drawing,
            )
        )
    return panels


def _draw_bins(binned_bounds: BinnedBounds) -> Figure:
    """Draw the bounds of each probability bin on axes of their own; at most MOST_BINS bins, evenly spaced."""
    shown = choose_evenly(binned_bounds.bins, MOST_BINS)
    rows = ceil(len(shown) / BINS_A_ROW)
    drawing, all_axes = figure(
        BIN_MARGINS + BIN_ROW_HEIGHT * rows,
        rows=rows,
        columns=BINS_A_ROW,
        left=RATIO_MARGIN,
        sharex=True,
        sharey=True,
    )
    top = max(LEAST_TOP_OF_RATIOS, HEADROOM * binned_bounds.highest)
    used_axes = all_axes[: len(shown)]
    for axes, bounds_of_bin in zip(used_axes, shown, strict=True):
        _draw_band(axes, bounds_of_bin.bounds, binned_bounds.colour)
        title = f"{bounds_of_bin.probability_from:.2g}–{bounds_of_bin.probability_to:.2g}"
        if bounds_of_bin.probability_from == 0:
            # The first title says that all of them are ranges of p.
            title = f"p  {title}"
        axes.set_title(title, pad=4)
        axes.set_ylim(0, top)
    for axes in all_axes[len(shown) :]:
        axes.axis("off")
    # The lowest axes of each column name the steps.
    for axes in used_axes[-BINS_A_ROW:]:
        axes.tick_params(labelbottom=True)
        step_axis(axes, ticks=2)
    return drawing


def _draw_search(searched_bounds: SearchedBounds) -> Figure:
    """Draw the bounds and, below them, the positive tokens' share at which the search aims, if it is logged."""
    has_shares = len(searched_bounds.share_before) > 0
    if has_shares:
        drawing, all_axes = figure(SEARCH_WITH_SHARES_HEIGHT, rows=2, sharex=True)
    else:
        drawing, all_axes = figure(SEARCH_HEIGHT, sharex=True)
    _draw_band(all_axes[0], searched_bounds.bounds, searched_bounds.colour)
    all_axes[0].set_title("bounds on the ratio")
    if has_shares:
        axes_of_shares = all_axes[1]
        curve(axes_of_shares, searched_bounds.share_before, searched_bounds.colour, lw=1, ls=DASHED)
        curve(axes_of_shares, searched_bounds.share_after, searched_bounds.colour)
        axes_of_shares.axhline(searched_bounds.target, color=INK, lw=0.7)
        axes_of_shares.set_title("positive share: before (dashed), after, target")
        axes_of_shares.set_ylim(0, 1)
    step_axis(all_axes[-1])
    return drawing


def _draw_band(axes: Axes, bounds: BoundsByStep, colour: str) -> None:
    """Draw the band between two bounds, dashed lines for the bounds of each step's last update, and GRPO's bounds."""
    low, high = bounds.low.align(bounds.high, join="inner")
    low_line = curve(axes, low, colour)
    high_line = curve(axes, high, colour)
    axes.fill_between(low_line.index, low_line, high_line, color=colour, alpha=0.14, lw=0)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axhline(bound, color=GRPO, lw=1)
    for bound in (summarise_windows(bounds.low_last), summarise_windows(bounds.high_last)):
        axes.plot(bound.index, bound, color=colour, lw=1, ls=DASHED)


# --- Bars ------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A bar at each step, all in one colour.

    Args:
        start, end: where each bar begins and ends, by step; a bar that ends below 0 points down.
        colour: the colour of the bars' faces.
        hatch: the hatch of the bars' faces; None for filled bars.
    """

    start: pandas.Series
    end: pandas.Series
    colour: str
    hatch: str | None = None


class Bars(NamedTuple):
    """What a figure of bars shows of a setting.

    Args:
        label: the setting's label.
        description: a text for those who cannot see the figure.
        title: what stands above the bars, within the figure.
        layers: the bars, the later ones on top.
        floor: what rounding clips, drawn as a grey band over the bars; None for no band.
    """

    label: str
    description: str
    title: str
    layers: Sequence[Layer]
    floor: FloorByStep | None = None


def draw_clipped_shares(settings: Sequence[ClippedShares]) -> list[Panel]:
    """Draw the clipped share of tokens over steps."""
    return _draw_bar_panels("fractions", [_bars_of_clipped(setting) for setting in settings])


def _bars_of_clipped(shares: ClippedShares) -> Bars:
    """Return the bars of a setting's clipped share."""
    description = f"Bars of the share of tokens that {shares.label} clips in each step, high upwards, low downwards."
    if shares.floor is not None:
        description += " A grey band spans what rounding clips before anything has moved."
    title = "none"
    if shares.highest_of_both > 0:
        highest = percent(shares.highest_of_both)
        title = f"{percent(shares.mean_of_both)} of all tokens; most {highest}, step {shares.step_of_highest}"
    return Bars(
        label=shares.label,
        description=description,
        title=title,
        layers=[
            Layer(start=_zeros(shares.high), end=shares.high, colour=CLIPPED_HIGH),
            Layer(start=_zeros(shares.low), end=-shares.low, colour=CLIPPED_LOW),
        ],
        floor=shares.floor,
    )


def draw_mass(settings: Sequence[MassShares]) -> list[Panel]:
    """Draw the share of the gradient's mass outside the bounds, by region, over steps."""
    return _draw_bar_panels("mass", [_bars_of_mass(setting) for setting in settings])


def _bars_of_mass(mass: MassShares) -> Bars:
    """Return the bars of a setting's gradient mass outside its bounds.

    The bars of regions above the upper bound point up: HN has A < 0, and HP has A > 0. The bars of regions below the
    lower bound point down: LP has A > 0, and LN has A < 0. PPO's clip keeps the mass of HN and LP, whose bars are
    hatched. It takes the mass of HP and LN, whose bars are filled and stand on the hatched ones.
    """
    shares = mass.shares
    return Bars(
        label=mass.label,
        description=f"Bars of the share of {mass.label}’s gradient mass outside its bounds, by region and step.",
        title=f"outside the bounds: {percent(mass.outside)} of the mass",
        layers=[
            Layer(start=_zeros(shares.HN), end=shares.HN, colour="white", hatch="////"),
            Layer(start=shares.HN, end=shares.HN + shares.HP, colour=CLIPPED_HIGH),
            Layer(start=_zeros(shares.LP), end=-shares.LP, colour="white", hatch="////"),
            Layer(start=-shares.LP, end=-shares.LP - shares.LN, colour=CLIPPED_LOW),
        ],
    )


def _zeros(values: pandas.Series) -> pandas.Series:
    """Return 0 at each step of a metric; NaN where it has no value, so that no bar begins there."""
    return 0 * values


def _draw_bar_panels(name: str, bars_of_settings: Sequence[Bars]) -> list[Panel]:
    """Draw a figure of bars for each setting.

    Args:
        name: the beginning of the names of their files.
        bars_of_settings: what each figure shows.
    """
    limits = _find_limits(bars_of_settings)
    return [
        Panel(
            name=f"{name}_{index}",
            title=bars.label,
            description=bars.description,
            drawing=_draw_bars(bars, limits),
        )
        for index, bars in enumerate(bars_of_settings)
    ]


def _find_limits(bars_of_settings: Sequence[Bars]) -> tuple[float, float]:
    """Return the lower and the upper end of the axis of shares, which all figures have in common."""
    ends: list[pandas.Series] = []
    for bars in bars_of_settings:
        for layer in bars.layers:
            ends += [summarise_windows(layer.end, LOW), summarise_windows(layer.end, HIGH)]
        if bars.floor is not None:
            ends += [summarise_windows(-bars.floor.low), summarise_windows(bars.floor.high)]
    longest_up = max([0.0, *(end.max() for end in ends)])
    longest_down = max([0.0, *((-end).max() for end in ends)])
    room = LEAST_ROOM * HEADROOM * max(longest_down, longest_up, SHORTEST_BAR)
    return -max(HEADROOM * longest_down, room), max(HEADROOM * longest_up, room)


def _draw_bars(bars: Bars, limits: tuple[float, float]) -> Figure:
    """Draw the bars of a setting; `limits` are the ends of the axis of shares."""
    drawing, (axes,) = figure(BARS_HEIGHT, left=SHARE_MARGIN)
    for layer in bars.layers:
        _draw_layer(axes, layer)
    if bars.floor is not None:
        # The band spans what rounding clips at both bounds. What it clips at the lower bound points down.
        low = summarise_windows(-bars.floor.low)
        high = summarise_windows(bars.floor.high)
        # It is drawn over the bars, so that it shows how much of each bar is within it.
        axes.fill_between(low.index, low, high, step="mid", color=HAIR, alpha=0.55, lw=0)
    axes.set_ylim(*limits)
    axes.axhline(0, color=HAIR, lw=0.7)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(_percent_of_tick)
    step_axis(axes)
    axes.set_title(bars.title, fontweight="normal")
    return drawing


def _draw_layer(axes: Axes, layer: Layer) -> None:
    """Draw a layer of bars.

    A log of up to MOST_MARKS steps has a bar for each step. A longer log has one area with a stepped outline. For more
    than MOST_STEPS steps, the area shows the median of each window of steps, and a line over it spans the middle 80 %
    of the window.
    """
    start = summarise_windows(layer.start).dropna()
    end = summarise_windows(layer.end).dropna()
    steps = len(layer.end)
    has_single_bars = steps <= MOST_MARKS
    is_windowed = steps > MOST_STEPS
    if has_single_bars:
        edge = {"edgecolor": SOFT, "linewidth": 0.5} if layer.hatch else {}
        axes.bar(end.index, end - start, bottom=start, width=0.7, color=layer.colour, hatch=layer.hatch, **edge)
    else:
        edge = {"edgecolor": SOFT, "linewidth": 0.3} if layer.hatch else {"linewidth": 0}
        axes.fill_between(end.index, start, end, step="mid", facecolor=layer.colour, hatch=layer.hatch, **edge)
    if is_windowed and not layer.hatch and (end != start).any():
        low = summarise_windows(layer.end, LOW).dropna()
        high = summarise_windows(layer.end, HIGH).dropna()
        axes.vlines(end.index, low, high, color=layer.colour, lw=0.7, alpha=0.7)


# --- Axes ------------------------------------------------------------------------------------------------------------


def _percent_of_tick(share: float, _: int) -> str:
    """Return a tick's share in per cent, without its sign, because bars that point down show shares, too.

    The second argument is the place of the tick, which matplotlib passes.
    """
    if share == 0:
        return "0"
    return f"{abs(100 * share):.3g}\u202f%"


def step_axis(axes: Axes, *, ticks: int = 4) -> None:
    """Put whole training steps on the horizontal axis, and name the axis if it has room for a name.

    Args:
        axes: the axes.
        ticks: about how many ticks the axis gets. An axis with one or two is too short for a name.
    """
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    if ticks > 2:
        axes.set_xlabel("training step")
