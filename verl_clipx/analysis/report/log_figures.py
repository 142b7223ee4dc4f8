"""Figures of the runs' logs: up is above the upper bound, down is below the lower."""

import textwrap
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy
import pandas
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
    take_windows,
)
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, HAIR, INK, SOFT
from verl_clipx.analysis.runs.traced import GRPO_HIGH, GRPO_LOW
from verl_clipx.common.sentences import percent

MOST_BINS = 9
BINS_A_ROW = 3
# For the metrics of a panel, in turn.
LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
DASHED = (0, (3, 2))
# In a figure as narrow as a column, more diamonds would overlap.
MOST_DIAMONDS = 24
# A legend of more lines, or of longer ones, would stand on the labels of the axes.
MOST_NAMES = 8
NAME_CHARACTERS = 32


# --- Curves ----------------------------------------------------------------------------------------------------------


def draw_charts(charts: Sequence[Chart]) -> list[Panel]:
    """Draws each chart in a panel."""
    return [
        Panel(name=chart.name, title=chart.title, description=chart.description, drawing=_draw_chart(chart))
        for chart in charts
    ]


def _draw_chart(chart: Chart) -> Figure:
    """Draws a chart's lines on one pair of axes."""
    drawing, (axes,) = figure(236, left=52, top=12)
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
    """Draws the mean over the runs, a band from the lowest of them to the highest, and what is known of errors."""
    by_run = take_windows(line.by_run)
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
    """Draws the held-out rewards of a run, evenly thinned if there are many; the last one stays."""
    every = max(1, ceil(len(line.held_out) / MOST_DIAMONDS))
    for point in line.held_out[::-every]:
        if point.reward.low is not None:
            axes.vlines(point.step, point.reward.low, point.reward.high, color=line.colour, lw=1)
        axes.plot(point.step, point.reward.mean, "D", color="white", mec=line.colour, ms=6, mew=1.4)


def _name_lines(axes: Axes) -> None:
    """Adds a legend if there are several names: long ones are wrapped, and of many lines only some are named."""
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    if len(named) < 2:
        return
    places = numpy.linspace(0, len(named) - 1, min(len(named), MOST_NAMES)).astype(int)
    names = [list(named)[place] for place in places]
    legend = axes.legend([named[name] for name in names], [textwrap.fill(name, NAME_CHARACTERS) for name in names])
    for text in legend.get_texts():
        # Browsers give a line of text more height than Matplotlib does.
        text.set_linespacing(1.4)


# --- Bounds ----------------------------------------------------------------------------------------------------------


def draw_bounds(settings: Sequence[BinnedBounds | SearchedBounds]) -> list[Panel]:
    """Draws the bounds that each setting used, over steps."""
    return [
        Panel(
            name=f"bounds_{index}",
            title=setting.label,
            description=f"Bounds of {setting.label} over steps, against 0.8 to 1.2.",
            drawing=_draw_bins(setting) if isinstance(setting, BinnedBounds) else _draw_search(setting),
        )
        for index, setting in enumerate(settings)
    ]


def _draw_bins(setting: BinnedBounds) -> Figure:
    """Draws the bounds of each probability bin on axes of their own; of many bins some, evenly chosen."""
    places = numpy.linspace(0, len(setting.bins) - 1, min(len(setting.bins), MOST_BINS)).astype(int)
    shown = [setting.bins[place] for place in sorted(set(places))]
    rows = ceil(len(shown) / BINS_A_ROW)
    drawing, panels = figure(46 + 132 * rows, rows=rows, columns=BINS_A_ROW, left=30, sharex=True, sharey=True)
    for axes, bin in zip(panels, shown, strict=False):
        _draw_band(axes, bin.bounds, setting.colour)
        title = f"{bin.probability_from:.2g}–{bin.probability_to:.2g}"
        if bin.probability_from == 0:
            # The first one says what the others are too.
            title = f"p  {title}"
        axes.set_title(title, pad=4)
        axes.set_ylim(0, max(2.0, 1.08 * setting.highest))
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes in panels[max(0, len(shown) - BINS_A_ROW) : len(shown)]:
        axes.tick_params(labelbottom=True)
        step_axis(axes, ticks=2)
    return drawing


def _draw_search(setting: SearchedBounds) -> Figure:
    """Draws the bounds and, below them, the share that the search aims at, if it is logged."""
    has_shares = len(setting.share_before) > 0
    if has_shares:
        drawing, panels = figure(330, rows=2, sharex=True)
    else:
        drawing, panels = figure(220, sharex=True)
    _draw_band(panels[0], setting.bounds, setting.colour)
    panels[0].set_title("bounds on the ratio")
    if has_shares:
        axes = panels[1]
        curve(axes, setting.share_before, setting.colour, lw=1, ls=DASHED)
        curve(axes, setting.share_after, setting.colour)
        axes.axhline(setting.target, color=INK, lw=0.7)
        axes.set_title("positive share: before (dashed), after, target")
        axes.set_ylim(0, 1)
    step_axis(panels[-1])
    return drawing


def _draw_band(axes: Axes, bounds: BoundsByStep, colour: str) -> None:
    """Draws the band between two bounds, dashed those of a step's last update, and GRPO's."""
    lines = [curve(axes, bound, colour) for bound in bounds.low.align(bounds.high, join="inner")]
    axes.fill_between(lines[0].index, *lines, color=colour, alpha=0.14, lw=0)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axhline(bound, color=GRPO, lw=1)
    for bound in (take_windows(bounds.low_last), take_windows(bounds.high_last)):
        axes.plot(bound.index, bound, color=colour, lw=1, ls=DASHED)


# --- Bars ------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Bars over steps.

    Args:
        start, end: between which each bar stands; below 0 it points down.
        colour: of its face.
        hatch: of its face; None for a filled bar.
    """

    start: pandas.Series
    end: pandas.Series
    colour: str
    hatch: str | None = None


class Bars(NamedTuple):
    """A panel of bars.

    Args:
        label: of its setting.
        description: for those who can't see it.
        title: within the panel.
        layers: the bars.
        floor: drawn as a grey band over them.
    """

    label: str
    description: str
    title: str
    layers: Sequence[Layer]
    floor: FloorByStep | None = None


def draw_clipped_shares(settings: Sequence[ClippedShares]) -> list[Panel]:
    """Draws the clipped share of tokens over steps."""
    return _draw_bar_panels("fractions", [_bars_of_clipped(setting) for setting in settings])


def _bars_of_clipped(shares: ClippedShares) -> Bars:
    """Returns the bars of a setting's clipped share."""
    description = f"Bars of the share of tokens that {shares.label} clips in each step, high upwards, low downwards."
    if shares.floor is not None:
        description += " A grey band spans what rounding clips before anything has moved."
    title = "none"
    if shares.most > 0:
        title = f"{percent(shares.mean)} of all tokens; most {percent(shares.most)}, step {shares.most_at}"
    return Bars(
        label=shares.label,
        description=description,
        title=title,
        layers=[
            Layer(start=0 * shares.high, end=shares.high, colour=CLIPPED_HIGH),
            Layer(start=0 * shares.low, end=-shares.low, colour=CLIPPED_LOW),
        ],
        floor=shares.floor,
    )


def draw_mass(settings: Sequence[MassShares]) -> list[Panel]:
    """Draws the share of the gradient's mass outside the bounds, by region, over steps."""
    return _draw_bar_panels("mass", [_bars_of_mass(setting) for setting in settings])


def _bars_of_mass(mass: MassShares) -> Bars:
    """Returns the bars of a setting's gradient mass: up above the upper bound, down below the lower one.

    The hatched bars are the mass that PPO's clip keeps there, the filled ones the mass that it would take.
    """
    shares = mass.shares
    return Bars(
        label=mass.label,
        description=f"Bars of the share of {mass.label}’s gradient mass outside its bounds, by region and step.",
        title=f"outside the bounds: {percent(mass.outside)} of the mass",
        layers=[
            Layer(start=0 * shares.HN, end=shares.HN, colour="white", hatch="////"),
            Layer(start=shares.HN, end=shares.HN + shares.HP, colour=CLIPPED_HIGH),
            Layer(start=0 * shares.LP, end=-shares.LP, colour="white", hatch="////"),
            Layer(start=-shares.LP, end=-shares.LP - shares.LN, colour=CLIPPED_LOW),
        ],
    )


def _draw_bar_panels(name: str, panels: Sequence[Bars]) -> list[Panel]:
    """Draws bars for each setting; all have the same axis of shares."""
    ends: list[pandas.Series] = []
    for panel in panels:
        for layer in panel.layers:
            ends += [take_windows(layer.end, LOW), take_windows(layer.end, HIGH)]
        if panel.floor is not None:
            ends += [take_windows(-panel.floor.low), take_windows(panel.floor.high)]
    highest = max([0.0, *(end.max() for end in ends)])
    lowest = max([0.0, *((-end).max() for end in ends)])
    # Room for a bar of nothing, so that an axis is never empty.
    room = 0.15 * 1.08 * max(lowest, highest, 1e-4)
    limits = (-max(1.08 * lowest, room), max(1.08 * highest, room))
    return [
        Panel(
            name=f"{name}_{index}",
            title=panel.label,
            description=panel.description,
            drawing=_draw_bars(panel, limits),
        )
        for index, panel in enumerate(panels)
    ]


def _draw_bars(panel: Bars, limits: tuple[float, float]) -> Figure:
    """Draws a panel of bars; `limits` are the ends of its axis of shares."""
    drawing, (axes,) = figure(220, left=52)
    for layer in panel.layers:
        _draw_layer(axes, layer)
    if panel.floor is not None:
        low = take_windows(-panel.floor.low)
        high = take_windows(panel.floor.high)
        # Over the bars, so that it shows how much of each is within it.
        axes.fill_between(low.index, low, high, step="mid", color=HAIR, alpha=0.55, lw=0)
    axes.set_ylim(*limits)
    axes.axhline(0, color=HAIR, lw=0.7)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(_percent_of_tick)
    step_axis(axes)
    axes.set_title(panel.title, fontweight="normal")
    return drawing


def _draw_layer(axes: Axes, layer: Layer) -> None:
    """Draws a bar for each step or, above MOST_MARKS steps, one area whose outline steps.

    Above MOST_STEPS steps it shows the median of each window, and a line over a filled area spans its middle 80 %.
    """
    start = take_windows(layer.start).dropna()
    end = take_windows(layer.end).dropna()
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
        low = take_windows(layer.end, LOW).dropna()
        high = take_windows(layer.end, HIGH).dropna()
        axes.vlines(end.index, low, high, color=layer.colour, lw=0.7, alpha=0.7)


# --- Axes ------------------------------------------------------------------------------------------------------------


def _percent_of_tick(share: float, _: int) -> str:
    """Returns a tick's share in per cent without its sign, since bars point down for what is below a bound."""
    if share == 0:
        return "0"
    return f"{abs(100 * share):.3g}\u202f%"


def step_axis(axes: Axes, *, ticks: int = 4) -> None:
    """Puts whole training steps on the horizontal axis, and names it if it has room for more than two ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    if ticks > 2:
        axes.set_xlabel("training step")
