"""Figures of every other declared metric that has a chart: to see a metric here, declare it with one."""

import re

from verl_clipx.base.metric import Metric
from verl_clipx.diagnostics import keys
from verl_clipx.diagnostics.drawing import end_labels, figure
from verl_clipx.diagnostics.log_figures import MOST_BARS, Panel, Plate, step_axis
from verl_clipx.diagnostics.runs import Setting
from verl_clipx.loss.metric_listing import every_metric
from verl_clipx.methods import METHODS

# Of the metrics of a chart, in turn.
LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def declared_charts(columns: set[str]) -> dict[str, dict[str, Metric]]:
    """The charts that no other figure draws: chart to the columns of a log in it, with their declarations.

    Args:
        columns: of all logs.
    """
    charts: dict[str, dict[str, Metric]] = {}
    for _, metric in every_metric(METHODS):
        pattern = re.compile(rf"(actor/)?{metric.pattern}")
        found = {column: metric for column in sorted(columns) if pattern.fullmatch(column)}
        if metric.chart and found and not keys.is_drawn(next(iter(found))):
            charts.setdefault(metric.chart, {}).update(found)
    return charts


def declared_plate(settings: list[Setting]) -> Plate:
    """One figure for each chart, with the declared meaning of what is in it."""
    columns = {column for setting in settings for run in setting.runs for column in run.log}
    panels, meanings = [], {}
    for index, (chart, metrics) in enumerate(declared_charts(columns).items()):
        told = dict.fromkeys(f"{metric.name}: {metric.meaning} ({metric.unit})" for metric in metrics.values())
        meanings |= told
        drawing, (axes,) = figure(220, left=52)
        ends = []
        for setting in settings:
            for column, line_style in zip(metrics, LINE_STYLES * len(metrics), strict=False):
                mean = setting.mean(column).dropna()
                if mean.empty:
                    continue
                marker = "o" if len(mean) <= MOST_BARS else None
                axes.plot(mean.index, mean, color=setting.colour, ls=line_style, marker=marker, markersize=3)
                name = column.rpartition("/")[2] if len(metrics) > 1 else setting.label
                ends.append((mean.index[-1], mean.iloc[-1], name, setting.colour))
        step_axis(axes)
        if len(ends) > 1:
            drawing.subplots_adjust(right=1 - min(0.4, (12 + 6.6 * max(len(name) for _, _, name, _ in ends)) / 348))
            end_labels(axes, ends)
        panels.append(Panel(f"declared_{index}", chart, f"{'; '.join(told)}, over training steps.", drawing))
    return Plate(
        "What else was logged",
        "a curve that changes where reward, entropy or clipping change.",
        "; ".join(meanings) + ".",
        panels,
    )
