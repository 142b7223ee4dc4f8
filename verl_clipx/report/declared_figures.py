"""Figures of every other declared metric that has a chart: to see a metric here, declare it with one."""

import re

from verl_clipx.base.metric import Metric
from verl_clipx.loss.metric_listing import every_metric
from verl_clipx.methods import METHODS
from verl_clipx.report.drawing import figure, label_ends
from verl_clipx.report.log_figures import Panel, Plate, step_axis
from verl_clipx.report.palette import DrawnSetting
from verl_clipx.report.windows import curve, describe_windows, marks, window_of
from verl_clipx.runs import keys
from verl_clipx.runs.settings import differing_parts

# For the metrics of a chart, in turn.
LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def declared_charts(columns: set[str]) -> dict[str, dict[str, Metric]]:
    """The charts that no other figure draws: chart to the columns of all logs in it, each with its declaration."""
    charts: dict[str, dict[str, Metric]] = {}
    for _, metric in every_metric(METHODS):
        pattern = re.compile(rf"(actor/)?{metric.pattern}")
        of_metric = [column for column in sorted(columns) if pattern.fullmatch(column)]
        if metric.chart and of_metric and not keys.is_drawn(of_metric[0]):
            charts.setdefault(metric.chart, {}).update(dict.fromkeys(of_metric, metric))
    return charts


def declared_plate(settings: list[DrawnSetting]) -> Plate:
    """One figure for each chart, with the declared meaning of what is in it."""
    columns = {column for setting in settings for run in setting.runs for column in run.log}
    panels, meanings, window = [], {}, window_of(settings)
    for index, (chart, metrics) in enumerate(declared_charts(columns).items()):
        of_chart = dict.fromkeys(f"{metric.name}: {metric.meaning} ({metric.unit})" for metric in metrics.values())
        meanings |= of_chart
        names = apart(list(metrics)) if len(metrics) > 1 else None
        drawing, (axes,) = figure(220, left=52)
        ends = []
        for setting in settings:
            for position, (column, line_style) in enumerate(zip(metrics, LINE_STYLES * len(metrics), strict=False)):
                mean = setting.mean(column).dropna()
                if len(mean):
                    middle = curve(axes, mean, window, setting.colour, ls=line_style, **marks(mean, window))
                    name = names[position] if names else setting.label
                    ends.append((middle.index[-1], middle.iloc[-1], name, setting.colour))
        step_axis(axes)
        if len(ends) > 1:
            label_ends(drawing, axes, ends)
        panels.append(Panel(f"declared_{index}", chart, f"{'; '.join(of_chart)}, over training steps.", drawing))
    return Plate(
        "What else was logged",
        "a curve that changes where reward, entropy or clipping change.",
        f"{describe_windows(window)}{'; '.join(meanings)}.",
        panels,
        "" if columns & {*keys.MASKED.values()} else f"{', '.join(panel.title for panel in panels)}.",
    )


def apart(columns: list[str]) -> list[str]:
    """What tells the columns of a chart apart: their keys without the parts with which all of them begin or end."""
    return ["/".join(key).replace("_", " ") for key in differing_parts([column.split("/") for column in columns])]
