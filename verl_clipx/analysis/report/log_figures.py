"""Figures of the runs' logs: up is above the upper bound, down is below the lower.

Every declared metric with a chart has one: to see a metric, declare it with one.
"""

import re
import textwrap
from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_clipx.analysis.diagnose.findings import clipped_share, has_searched_bounds, mass_shares
from verl_clipx.analysis.report.drawing import HIGH, LOW, MOST_MARKS, MOST_STEPS, curve, figure, take_windows
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, HAIR, INK, SOFT, DrawnSetting
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import differing_parts
from verl_clipx.analysis.runs.traced import GRPO_HIGH, GRPO_LOW
from verl_clipx.common.files import EMPTY
from verl_clipx.common.sentences import percent
from verl_clipx.losses.applying.metric_listing import every_metric
from verl_clipx.losses.base.metric import Metric
from verl_clipx.losses.methods import METHODS

MOST_BINS = 9
# For the metrics of a panel, in turn.
LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
# In a figure as narrow as a column, more diamonds would overlap.
MOST_DIAMONDS = 24
# A legend of more lines, or of longer ones, would stand on the labels of the axes.
MOST_NAMES = 8
NAME_CHARACTERS = 32


class Panel(NamedTuple):
    """A figure of the page's width."""

    name: str
    title: str
    description: str
    drawing: Figure


class Plate(NamedTuple):
    """The figures under one heading; none if no log has what they show.

    Args:
        name, facts: from these templates/captions.html makes what to look for and a note.
        folded: why there is nothing to see; such a plate is closed until a reader opens it.
    """

    name: str
    heading: str
    panels: list[Panel]
    folded: str = ""
    facts: Mapping[str, Any] = EMPTY


def log_plates(settings: list[DrawnSetting]) -> list[Plate]:
    """Returns the plates of which the logs allow a figure: outcome first, then mechanism."""
    runs = [run for setting in settings for run in setting.runs]
    errors = {"errors": any(len(run.values(keys.REWARD_ERROR)) for run in runs)}
    plates = [
        Plate("outcome", "Reward, entropy, KL and gradient norm", _panels(settings, OUTCOMES), facts=errors),
        *(draw(settings) for draw in (bounds, fractions, masses)),
        Plate("samples", "What the samples were like", _panels(settings, SAMPLES)),
        draw_declared(settings),
    ]
    return [plate for plate in plates if plate.panels]


OUTCOMES = (
    ("reward", "Reward", keys.REWARD),
    ("entropy", "Entropy, nats a token", keys.ENTROPY),
    ("kl", "KL from the old policy, nats a token", keys.KL),
    ("gradient_norm", "Gradient norm before clipping", keys.GRADIENT_NORM),
)
SAMPLES = (
    ("length", "Response length, tokens", keys.LENGTH),
    ("cut", "Responses cut at the limit", keys.CUT),
    ("alike", "Prompts whose samples score alike", keys.ALIKE),
    ("mismatch", "Mismatch of rollout and trainer, |Δp|", keys.MISMATCH),
)


def _panels(settings: list[DrawnSetting], measures: tuple[tuple[str, str, str], ...]) -> list[Panel]:
    return [
        Panel(name, title, f"{title}, over training steps.", draw_lines(settings, {key: ""}))
        for name, title, key in measures
        if any(len(setting.mean(key)) for setting in settings)
    ]


def draw_lines(settings: list[DrawnSetting], names: dict[str, str], *, from_zero: bool = True) -> Figure:
    """Draws metrics of all settings over steps, in one panel.

    Args:
        names: key to what the panel calls a metric, empty for the only one; each has a line style of its own.
    """
    drawing, (axes,) = figure(236, left=52, top=12)
    for setting in settings:
        for (key, name), line_style in zip(names.items(), LINE_STYLES * len(names), strict=False):
            table = take_windows(setting.table(key))
            if table.empty:
                continue
            if table.shape[1] > 1:
                colour = {"color": setting.colour, "alpha": 0.15, "lw": 0}
                axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), **colour)
            line = curve(axes, setting.mean(key), setting.colour, ls=line_style, label=name or setting.label)
            if key == keys.REWARD and len(setting.runs) == 1:
                error = 1.96 * setting.mean(keys.REWARD_ERROR)
                error = error[error.index.isin(line.index)]
                axes.vlines(error.index, line[error.index] - error, line[error.index] + error, setting.colour, lw=1)
                _diamonds(axes, setting)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0, low) if from_zero else low, high)
    if keys.SHARES.issuperset(names):
        axes.yaxis.set_major_formatter(_percent_of_tick)
    step_axis(axes)
    _name_lines(axes)
    return drawing


def _name_lines(axes: Axes) -> None:
    """Adds a legend if there are several names: long ones are wrapped, and of many lines only some are named."""
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    if len(named) < 2:
        return
    chosen = numpy.linspace(0, len(named) - 1, min(len(named), MOST_NAMES)).astype(int)
    names = [list(named)[index] for index in chosen]
    legend = axes.legend([named[name] for name in names], [textwrap.fill(name, NAME_CHARACTERS) for name in names])
    for text in legend.get_texts():
        # Browsers give a line of text more height than Matplotlib does.
        text.set_linespacing(1.4)


def _diamonds(axes: Axes, setting: DrawnSetting) -> None:
    """Draws the held-out rewards of a run, evenly thinned if there are many; the last one stays."""
    held_out = setting.runs[0].held_out
    for point in held_out[:: -max(1, ceil(len(held_out) / MOST_DIAMONDS))]:
        if point.reward.low is not None:
            axes.vlines(point.step, point.reward.low, point.reward.high, color=setting.colour, lw=1)
        axes.plot(point.step, point.reward.mean, "D", color="white", mec=setting.colour, ms=6, mew=1.4)


def bounds(settings: list[DrawnSetting]) -> Plate:
    """Draws the bounds that each setting used, over steps."""
    panels = []
    drawn = [setting for setting in settings if setting.bins("epsilon") or has_searched_bounds(setting)]
    for index, setting in enumerate(drawn):
        draw = _draw_bins if setting.bins("epsilon") else _draw_search
        text = f"Bounds of {setting.label} over steps, against 0.8 to 1.2."
        panels.append(Panel(f"bounds_{index}", setting.label, text, draw(setting)))
    of_last = any(setting.bins("epsilon_last") or len(setting.mean(keys.BOUND_HIGH_LAST)) for setting in drawn)
    facts = {"of_last": of_last, "searched": any(map(has_searched_bounds, settings))}
    return Plate("bounds", "How the bounds moved", panels, facts=facts)


def _draw_bins(setting: DrawnSetting) -> Figure:
    names = setting.bins("epsilon")
    shown = [names[i] for i in sorted(set(numpy.linspace(0, len(names) - 1, min(len(names), MOST_BINS)).astype(int)))]
    rows = ceil(len(shown) / 3)
    drawing, panels = figure(46 + 132 * rows, rows=rows, columns=3, left=30, sharex=True, sharey=True)
    highest = max(1 + setting.mean(name).max() for name in (*names, *setting.bins("epsilon_last")))
    for axes, name in zip(panels, shown, strict=False):
        bin = int(name.rpartition("_")[2])
        both = [setting.mean(key) for key in (name, name.replace("/epsilon/", "/epsilon_last/"))]
        mean, last = [[(1 - epsilon).clip(lower=0), 1 + epsilon] for epsilon in both]
        _draw_bounds(axes, mean, last, setting.colour)
        edges = f"{bin / len(names):.2g}–{(bin + 1) / len(names):.2g}"
        axes.set_title(f"p  {edges}" if bin == 0 else edges, pad=4)
        axes.set_ylim(0, max(2.0, 1.08 * highest))
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes in panels[max(0, len(shown) - 3) : len(shown)]:
        axes.tick_params(labelbottom=True)
        step_axis(axes, ticks=2)
    return drawing


def _draw_search(setting: DrawnSetting) -> Figure:
    share = setting.mean(keys.SHARE_BEFORE)
    drawing, panels = figure(330 if len(share) else 220, rows=2 if len(share) else 1, sharex=True)
    mean = [setting.mean(key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    last = [setting.mean(key) for key in (keys.BOUND_LOW_LAST, keys.BOUND_HIGH_LAST)]
    _draw_bounds(panels[0], mean, last, setting.colour)
    panels[0].set_title("bounds on the ratio")
    if len(share):
        axes, after = panels[1], setting.mean(keys.SHARE_AFTER)
        curve(axes, share, setting.colour, lw=1, ls=(0, (3, 2)))
        curve(axes, after, setting.colour)
        axes.axhline(setting.runs[0].record.loss.parameters.get("target", 0.4), color=INK, lw=0.7)
        axes.set_title("positive share: before (dashed), after, target")
        axes.set_ylim(0, 1)
    step_axis(panels[-1])
    return drawing


def _draw_bounds(axes: Axes, mean: list[pandas.Series], last: list[pandas.Series], colour: str) -> None:
    """Draws the band between two bounds, dashed those of a step's last update, and GRPO's."""
    lines = [curve(axes, bound, colour) for bound in mean[0].align(mean[1], join="inner")]
    axes.fill_between(lines[0].index, *lines, color=colour, alpha=0.14, lw=0)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axhline(bound, color=GRPO, lw=1)
    for bound in map(take_windows, last):
        axes.plot(bound.index, bound, color=colour, lw=1, ls=(0, (3, 2)))


Layer = tuple[pandas.Series, pandas.Series | float, str, str | None]
"""Bars over steps: where they end and begin, their colour and hatch."""
Band = tuple[pandas.Series, pandas.Series]
"""A band over steps: its lower and its upper end."""


def fractions(settings: list[DrawnSetting]) -> Plate:
    """Draws the clipped share of tokens over steps."""
    known, drawn = [setting for setting in settings if len(clipped_share(setting))], []
    floors: list[Band | None] = []
    for setting in known:
        of_all, high, low = clipped_share(setting), setting.mean(keys.CLIPPED_HIGH), setting.mean(keys.CLIPPED_LOW)
        title = f"{percent(of_all.mean())} of all tokens; most {percent(of_all.max())}, step {of_all.idxmax()}"
        text = f"Bars of the share of tokens that {setting.label} clips in each step, high upwards, low downwards."
        layers: list[Layer] = [(high, 0.0, CLIPPED_HIGH, None), (-low, 0.0, CLIPPED_LOW, None)]
        band = floor_of(setting)
        if band is not None:
            text += " A grey band spans what rounding clips before anything has moved."
        drawn.append((setting, text, title if of_all.max() > 0 else "none", layers))
        floors.append(band)
    panels = _bar_panels("fractions", drawn, floors)
    of_verl = [one for one in settings if one not in known and len(one.mean(keys.PG_CLIPPED))]
    for index, setting in enumerate(of_verl, len(known)):
        text = f"{keys.PG_CLIPPED} of {setting.label} over training steps."
        panels.append(Panel(f"fractions_{index}", setting.label, text, draw_lines([setting], {keys.PG_CLIPPED: ""})))
    idle = not of_verl and all(clipped_share(setting).max() == 0 for setting in known)
    folded = "No token left the bounds on the side where PPO clips." if idle else ""
    facts = {
        "of_verl_only": not known,
        "of_verl": [setting.label for setting in of_verl],
        "floor": any(band is not None for band in floors),
    }
    heading = "How many tokens are outside the bounds" if known else "How many tokens verl counts as clipped"
    return Plate("fractions", heading, panels, folded, facts)


def masses(settings: list[DrawnSetting]) -> Plate:
    """Draws the share of the gradient's mass outside the bounds, by region, over steps."""
    known, drawn = [(setting, shares) for setting in settings if len(shares := mass_shares(setting))], []
    for setting, shares in known:
        title = f"outside the bounds: {percent((1 - shares.M).mean())} of the mass"
        text = f"Bars of the share of {setting.label}’s gradient mass outside its bounds, by region and step."
        # Steps without any mass stay on the axis.
        of = shares.reindex(setting.mean(keys.MASS["M"]).index)
        layers: list[Layer] = [
            (of.HN, 0.0, "white", "////"),
            (of.HN + of.HP, of.HN, CLIPPED_HIGH, None),
            (-of.LP, 0.0, "white", "////"),
            (-of.LP - of.LN, -of.LP, CLIPPED_LOW, None),
        ]
        drawn.append((setting, text, title, layers))
    folded = (
        "Tokens that are clipped keep no gradient." if all((one.LN + one.HP).max() == 0 for _, one in known) else ""
    )
    return Plate("mass", "Gradient mass outside the bounds", _bar_panels("mass", drawn), folded)


def floor_of(setting: DrawnSetting) -> Band | None:
    """Returns what rounding clips by step, below and above, by the larger of its measurements; None if not logged."""
    low, high = setting.mean(keys.FLOOR_LOW), setting.mean(keys.FLOOR_HIGH)
    if low.empty or high.empty:
        return None
    # The second one is made once after each start.
    recut_low, recut_high = setting.mean(keys.RECUT_LOW), setting.mean(keys.RECUT_HIGH)
    if len(recut_low) and recut_low.mean() + recut_high.mean() > low.mean() + high.mean():
        low, high = 0 * low + recut_low.mean(), 0 * high + recut_high.mean()
    return -low, high


def _bar_panels(
    name: str, drawn: list[tuple[DrawnSetting, str, str, list[Layer]]], floors: list[Band | None] | None = None
) -> list[Panel]:
    """Draws bars for each setting, with its description, title and layers; all have the same axis of shares.

    `floors` has a grey band for each setting, or None.
    """
    bands = floors or [None] * len(drawn)
    ends = [take_windows(layer[0], quantile) for *_, layers in drawn for layer in layers for quantile in (LOW, HIGH)]
    ends += [take_windows(side) for band in bands if band is not None for side in band]
    highest, lowest = (max([0.0, *((sign * end).max() for end in ends)]) for sign in (1, -1))
    # Room for a bar of nothing, so that an axis is never empty.
    room = 0.15 * 1.08 * max(lowest, highest, 1e-4)
    panels = []
    for index, ((setting, description, title, layers), band) in enumerate(zip(drawn, bands, strict=True)):
        drawing, (axes,) = figure(220, left=52)
        for layer in layers:
            _bars(axes, *layer)
        if band is not None:
            low, high = map(take_windows, band)
            # Over the bars, so that it shows how much of each is within it.
            axes.fill_between(low.index, low, high, step="mid", color=HAIR, alpha=0.55, lw=0)
        axes.set_ylim(-max(1.08 * lowest, room), max(1.08 * highest, room))
        axes.axhline(0, color=HAIR, lw=0.7)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(_percent_of_tick)
        step_axis(axes)
        axes.set_title(title, fontweight="normal")
        panels.append(Panel(f"{name}_{index}", setting.label, description, drawing))
    return panels


def _percent_of_tick(share: float, _: int) -> str:
    """Returns a tick's share in per cent without its sign, since bars point down for what is below a bound."""
    if share == 0:
        return "0"
    return f"{abs(100 * share):.3g}\u202f%"


def _bars(axes: Axes, to: pandas.Series, start: pandas.Series | float, colour: str, hatch: str | None) -> None:
    """Draws a bar for each step, or for each window its median; a line over a filled bar spans the middle 80 %."""
    start = start + 0 * to
    count, ends = len(to), [take_windows(to, quantile).dropna() for quantile in (LOW, HIGH)]
    short, (to, start) = count <= MOST_MARKS, (take_windows(values).dropna() for values in (to, start))
    edge = {"edgecolor": SOFT, "linewidth": 0.5 if short else 0.3} if hatch else {}
    if short:
        axes.bar(to.index, to - start, bottom=start, width=0.7, color=colour, hatch=hatch, **edge)
    else:
        axes.fill_between(to.index, start, to, step="mid", facecolor=colour, hatch=hatch, **(edge or {"linewidth": 0}))
    if count > MOST_STEPS and not hatch and (to != start).any():
        axes.vlines(to.index, *ends, color=colour, lw=0.7, alpha=0.7)


def step_axis(axes: Axes, *, ticks: int = 4) -> None:
    """Puts whole training steps on the horizontal axis, and names it if it has room for more than two ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    if ticks > 2:
        axes.set_xlabel("training step")


def declared_charts(columns: set[str]) -> dict[str, dict[str, Metric]]:
    """Returns the charts that no other figure draws: chart to the columns of all logs, each with its declaration."""
    charts: dict[str, dict[str, Metric]] = {}
    for _, metric in every_metric(METHODS):
        pattern = re.compile(rf"(actor/)?{metric.pattern}")
        of_metric = [column for column in sorted(columns) if pattern.fullmatch(column)]
        if metric.chart and of_metric and not keys.is_drawn(of_metric[0]):
            charts.setdefault(metric.chart, {}).update(dict.fromkeys(of_metric, metric))
    return charts


def draw_declared(settings: list[DrawnSetting]) -> Plate:
    """Draws a figure for each chart, with the declared meaning of what is in it."""
    columns = {column for setting in settings for run in setting.runs for column in run.log}
    panels, meanings = [], dict[str, None]()
    for index, (chart, metrics) in enumerate(declared_charts(columns).items()):
        of_chart = dict.fromkeys(f"{metric.name}: {metric.meaning} ({metric.unit})" for metric in metrics.values())
        meanings |= of_chart
        parts = differing_parts([key.split("/") for key in metrics]) if len(metrics) > 1 else [[]]
        names = {key: "/".join(part).replace("_", " ") for key, part in zip(metrics, parts, strict=True)}
        drawing = draw_lines(settings, names, from_zero=False)
        panels.append(Panel(f"declared_{index}", chart, f"{'; '.join(of_chart)}, over training steps.", drawing))
    folded = "" if columns & {*keys.MASKED.values()} else f"{', '.join(panel.title for panel in panels)}."
    return Plate("declared", "What else was logged", panels, folded, {"meanings": meanings})
