"""Figures of every other declared metric that has a chart: to see a metric here, declare it with one."""

import re

from verl_clipx.base.metric import Metric
from verl_clipx.loss.metric_listing import every_metric
from verl_clipx.methods import METHODS
from verl_clipx.report.log_figures import Panel, Plate, draw_lines
from verl_clipx.report.palette import DrawnSetting
from verl_clipx.runs import keys
from verl_clipx.runs.settings import differing_parts


def declared_charts(columns: set[str]) -> dict[str, dict[str, Metric]]:
    """Returns the charts that no other figure draws: chart to the columns of all logs, each with its declaration."""
    charts: dict[str, dict[str, Metric]] = {}
    for _, metric in every_metric(METHODS):
        pattern = re.compile(rf"(actor/)?{metric.pattern}")
        of_metric = [column for column in sorted(columns) if pattern.fullmatch(column)]
        if metric.chart and of_metric and not keys.is_drawn(of_metric[0]):
            charts.setdefault(metric.chart, {}).update(dict.fromkeys(of_metric, metric))
    return charts


def declared_plate(settings: list[DrawnSetting]) -> Plate:
    """Draws a figure for each chart, with the declared meaning of what is in it."""
    columns = {column for setting in settings for run in setting.runs for column in run.log}
    panels, meanings = [], dict[str, None]()
    for index, (chart, metrics) in enumerate(declared_charts(columns).items()):
        of_chart = dict.fromkeys(f"{metric.name}: {metric.meaning} ({metric.unit})" for metric in metrics.values())
        meanings |= of_chart
        names = dict(zip(metrics, apart(list(metrics)) if len(metrics) > 1 else [""], strict=True))
        drawing = draw_lines(settings, names, from_zero=False)
        panels.append(Panel(f"declared_{index}", chart, f"{'; '.join(of_chart)}, over training steps.", drawing))
    folded = "" if columns & {*keys.MASKED.values()} else f"{', '.join(panel.title for panel in panels)}."
    return Plate("declared", "What else was logged", panels, folded, {"meanings": meanings})


def apart(columns: list[str]) -> list[str]:
    """Returns the keys of a chart's columns without the parts with which all of them begin or end."""
    return ["/".join(key).replace("_", " ") for key in differing_parts([column.split("/") for column in columns])]
