"""Figures of traced tokens: dots rather than densities."""

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_clipx.analysis.report.drawing import figure
from verl_clipx.analysis.report.log_figures import Panel, Plate
from verl_clipx.analysis.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, INK, SOFT
from verl_clipx.analysis.runs.traced import (
    ABOVE,
    BELOW,
    GRPO_HIGH,
    GRPO_LOW,
    HIGH,
    KEPT,
    LOW,
    NONE,
    OUT,
    TracedUpdate,
    has_bounds_on_ratio,
)

BINS = 5
MOST_DOTS = 1000
MOST_CLIPPED = 500
# A share of fewer tokens than this says little.
FEW = 20


def is_clipped(tokens: pandas.DataFrame) -> pandas.Series:
    """Returns whether each token is clipped, by the rule that the run trained with."""
    return tokens.event.isin([LOW, HIGH])


def shown(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Returns at most MOST_DOTS tokens: clipped ones before others, evenly spaced in the order of the trace."""

    def thinned(rows: pandas.DataFrame, most: int) -> pandas.DataFrame:
        return rows if len(rows) <= most else rows.iloc[numpy.linspace(0, len(rows) - 1, most).astype(int)]

    clipped = thinned(tokens[is_clipped(tokens)], MOST_CLIPPED)
    return pandas.concat([thinned(tokens[~is_clipped(tokens)], MOST_DOTS - len(clipped)), clipped]).sort_index()


def how_many(update: TracedUpdate) -> str:
    """Names a panel: its setting, and how many of its tokens the panel shows."""
    total, drawn = len(update.tokens), len(shown(update.tokens))
    of = f"{total} tokens" if drawn == total else f"{drawn} of {total} tokens"
    left_out = f", {update.not_finite} not finite left out" if update.not_finite else ""
    return f"{update.setting.label}, {of}{left_out}"


def probabilities(tokens: pandas.DataFrame) -> pandas.Series:
    """Returns the probability of each token under the old policy."""
    return numpy.exp(tokens.old_log_prob).clip(0, 1)


def bin_of(tokens: pandas.DataFrame) -> pandas.Series:
    """Returns the probability bin of each token: BINS of equal width, the last one closed."""
    return (probabilities(tokens) * BINS).astype(int).clip(0, BINS - 1)


# From one line of counts above a panel to the next, in CSS pixels.
COUNT_LINE = 14

MARKS = {
    NONE: ("o", 10, "white", "#a8a8a8"),
    KEPT: ("o", 11, INK, "none"),
    ABOVE: ("o", 20, "white", INK),
    BELOW: ("o", 20, "white", INK),
    LOW: ("v", 38, CLIPPED_LOW, "white"),
    HIGH: ("^", 38, CLIPPED_HIGH, "white"),
    OUT: ("X", 28, "white", SOFT),
}


def _mark(axes: Axes, x: pandas.Series, y: pandas.Series, events: pandas.Series) -> None:
    for order, (event, (marker, size, face, edge)) in enumerate(MARKS.items(), 3):
        rows, looks = events == event, {"facecolor": face, "edgecolor": edge, "alpha": 0.5 if event == KEPT else 1}
        axes.scatter(x[rows], y[rows], marker=marker, s=size, lw=0.8, zorder=order, **looks)


def medians_of_bounds(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the median bounds of each probability bin with tokens, columns low and high."""
    return tokens.groupby(bin_of(tokens))[["low", "high"]].median()


def trace_plates(updates: list[TracedUpdate]) -> list[Plate]:
    """Draws the ratio by probability bin, with each setting's bounds and clipped tokens; nothing without traces."""
    if not updates:
        return []
    ends = [update.tokens.ratio.quantile(0.998) for update in updates]
    bounded = [update.tokens for update in updates if has_bounds_on_ratio(update.tokens)]
    ends += [high for tokens in bounded for high in medians_of_bounds(tokens).high]
    right = max(1.5, *(1.05 * end for end in ends if numpy.isfinite(end)))
    panels = [
        Panel(f"spread_{index}", how_many(update), *_draw_spread(update, min(right, 3.0)))
        for index, update in enumerate(updates)
    ]
    return [Plate("spread", "The ratio by probability", panels)]


def _draw_spread(update: TracedUpdate, right: float) -> tuple[str, Figure]:
    """Returns a panel's description and its drawing."""
    row, of_all, tokens = 58, update.tokens, shown(update.tokens)
    top = 3 * COUNT_LINE + 12
    drawing, (axes,) = figure(top + BINS * row + 58, left=50, top=top)
    bins, medians = bin_of(tokens), medians_of_bounds(of_all)
    middles, places = [bin * row + row / 2 for bin in range(BINS)], pandas.Series(0.0, index=tokens.index)
    for bin, y in enumerate(middles):
        if has_bounds_on_ratio(of_all) and bin in medians.index:
            low, high = max(0.0, medians.low[bin]), min(medians.high[bin], right)
            axes.fill_between([low, high], y - 24, y + 24, color=update.setting.colour, alpha=0.12, lw=0)
            axes.vlines([low, high], y - 24, y + 24, color=update.setting.colour, lw=1.5)
        # Fixed scattering across the line keeps most marks apart.
        places[bins == bin] = y + 21 * numpy.sin(12.9898 * numpy.arange((bins == bin).sum()))
    _mark(axes, tokens.ratio.clip(upper=right), places, tokens.event)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axvline(bound, color=GRPO, lw=1)
    axes.set_ylim(BINS * row, 0)
    axes.set_xlim(0, right)
    axes.set_yticks(middles, [f"{bin / BINS:g}–{(bin + 1) / BINS:g}" for bin in range(BINS)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ratio r = probability now / when sampled")
    high, low, outside = (int(of_all.event.isin(kinds).sum()) for kinds in ([HIGH], [LOW], [ABOVE, BELOW]))
    _write_counts(axes, high, low, outside)
    text = (
        f"Ratios of {update.setting.label} by probability, and median bounds: {high} tokens clipped high, {low} low, "
    )
    return f"{text}{outside} outside the bounds with a gradient.", drawing


def _write_counts(axes: Axes, high: int, low: int, outside: int) -> None:
    """Writes above a panel how many tokens are clipped high, clipped low, and outside the bounds with a gradient.

    Each count has a line of its own, so that no number of digits and no browser's font makes two of them overlap.
    """
    lines = (
        (f"▲ {high} clipped high", CLIPPED_HIGH, "bold"),
        (f"▼ {low} clipped low", CLIPPED_LOW, "bold"),
        (f"○ {outside} outside its bounds, with a gradient", SOFT, "normal"),
    )
    for place, (text, colour, weight) in enumerate(reversed(lines)):
        axes.annotate(
            text,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 8 + place * COUNT_LINE),
            textcoords="offset points",
            color=colour,
            weight=weight,
        )
