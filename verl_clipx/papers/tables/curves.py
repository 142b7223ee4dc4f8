"""Draws a figure's curves from `collect`'s results: one panel per column, one colour per row, over training steps."""

import csv
import io
from collections.abc import Mapping
from itertools import cycle, product
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from verl_clipx.common.files import no_formula
from verl_clipx.papers.tables.definition import Column, Table

PANEL_INCHES = (3.4, 2.6)
PANELS_A_LINE = 3
LEGEND_INCHES = 0.25

# Colours that colour-blind readers can tell apart (Petroff 2021); from the eleventh row on with another dash.
COLOURS = matplotlib.color_sequences["petroff10"]
DASHES = ("-", "--", ":")

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "clipx",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.3,
}


def write_curves(table: Table, results: Mapping[str, Any], markup: str) -> bytes:
    """Return the content of a file with a figure's curves."""
    if not table.is_figure:
        raise ValueError(f"--format {markup}: table {table.name} has no curves. Use markdown, html or latex")
    if not results["curves"]:
        raise ValueError(
            f"--format {markup}: no curve of {table.name} has been collected; `clipx table plan {table.name}` prints "
            "what is missing"
        )
    if markup == "csv":
        return _csv(results["curves"]).encode()
    with matplotlib.rc_context(STYLE):
        file = io.BytesIO()
        draw(table, results["curves"]).savefig(
            file, format=markup, dpi=144, metadata={"Date": None} if markup == "svg" else None
        )
    return file.getvalue()


def draw(table: Table, curves: list[Mapping[str, Any]]) -> Figure:
    """Draw one panel per column, in the table's order.

    Args:
        curves: from `collect`. Faint lines show each seed unsmoothed, strong lines the mean over seeds at each step.
    """
    columns = [column for column in table.columns if any(curve["column"] == column.name for curve in curves)]
    across = min(PANELS_A_LINE, len(columns))
    down = -(-len(columns) // across)
    rows = [row.name for row in table.rows if any(curve["row"] == row.name for curve in curves)]
    legend = LEGEND_INCHES * -(-len(rows) // across)
    size = (PANEL_INCHES[0] * across, PANEL_INCHES[1] * down + legend)
    drawing = Figure(figsize=size, layout="constrained")
    panels = drawing.subplots(down, across, squeeze=False).ravel()
    styles = dict(zip((row.name for row in table.rows), cycle(product(DASHES, COLOURS)), strict=False))
    for axes, column in zip(panels, columns, strict=False):
        _panel(axes, column, [curve for curve in curves if curve["column"] == column.name], styles)
    for axes in panels[len(columns) :]:
        axes.remove()
    lines = [Line2D([], [], color=styles[row][1], linestyle=styles[row][0], label=row) for row in rows]
    drawing.legend(handles=lines, loc="outside lower center", ncols=across, frameon=False)
    return drawing


def _panel(axes: Axes, column: Column, curves: list[Mapping[str, Any]], styles: Mapping[str, tuple[str, str]]) -> None:
    for row, (dash, colour) in styles.items():
        seeds = [curve for curve in curves if curve["row"] == row]
        for curve in seeds:
            axes.plot(curve["steps"], curve["values"], color=colour, linewidth=0.6, alpha=0.35)
        if seeds:
            axes.plot(*_mean(seeds), color=colour, linestyle=dash)
    axes.set_title(column.name)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(column.measure["curve"], fontsize="small")


def _mean(curves: list[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return all steps that any seed has, and at each the mean of the smoothed curves over the seeds that have it."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve["steps"], curve["smooth"], strict=True):
            by_step.setdefault(step, []).append(value)
    return sorted(by_step), [float(np.mean(by_step[step])) for step in sorted(by_step)]


def _csv(curves: list[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("row", "panel", "seed", "step", "value", "smooth"))
    for curve in curves:
        points = zip(curve["steps"], curve["values"], curve["smooth"], strict=True)
        writer.writerows((*map(no_formula, (curve["row"], curve["column"], curve["seed"])), *point) for point in points)
    return file.getvalue()
