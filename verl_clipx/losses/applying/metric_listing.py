"""Lists of every metric that a run may log, for `clipx metrics`, the site and the report's charts."""

from collections.abc import Iterable
from typing import NamedTuple

from verl_clipx.losses.applying.observed import OBSERVED_METRICS
from verl_clipx.losses.base.metric import Metric
from verl_clipx.losses.base.shared_metrics import METRICS
from verl_clipx.losses.methods import BUILT_IN, METHODS

# The sections in order: what most readers look for comes first, what only few need comes last.
SECTIONS = (
    "What was clipped",
    "How far the policy moved",
    "Health",
    "Where the gradient comes from",
    "The method's own bounds",
    "The run",
    "Stale samples",
    "How much is rounding",
)
# The lists that there are, as for `list_metric_rows`.
LISTS = ("default", "observe")


class MetricRow(NamedTuple):
    """One or more metrics with the same meaning.

    Attributes:
        keys: the keys under which verl logs them, without `actor/`.
        meaning: one line, beginning with the method's name if a method owns the metrics.
        metric: one of the metrics.
    """

    keys: list[str]
    meaning: str
    metric: Metric


def every_metric(methods: Iterable[str]) -> list[tuple[str, Metric]]:
    """Return every metric that runs with one of these methods may log.

    Args:
        methods: the names of the methods.

    Returns:
        Pairs of a method's name and a metric of it. The name is empty for a metric that every method logs.
    """
    of_methods = [(name, metric) for name in methods for metric in METHODS[name].logs]
    return [("", metric) for metric in METRICS] + of_methods


def list_metric_rows(which: str) -> list[MetricRow]:
    """Return the rows of a list, by section.

    Args:
        which: "default" for what runs log, "observe" for what +clipx=observe logs with another meaning.
    """
    if which == "observe":
        shared = {id(metric) for metric in METRICS}
        entries = [("", metric) for metric in OBSERVED_METRICS if id(metric) not in shared]
    else:
        entries = every_metric(BUILT_IN)
    in_order = sorted(entries, key=lambda entry: SECTIONS.index(entry[1].section))
    return merge(in_order)


def merge(entries: Iterable[tuple[str, Metric]]) -> list[MetricRow]:
    """Return a row for each metric, but one for neighbours that have the same section and meaning.

    Args:
        entries: pairs, as `every_metric` returns them.
    """
    rows: list[MetricRow] = []
    for method, metric in entries:
        meaning = f"{method.upper()}: {metric.meaning}" if method else metric.meaning
        key = metric.key.removeprefix("actor/")
        if metric.numbered:
            # The first member stands for the whole family.
            key += f"/{metric.numbered}_0"
        previous = rows[-1] if rows else None
        if previous is not None and previous.metric.section == metric.section and previous.meaning == meaning:
            previous.keys.append(key)
        else:
            rows.append(MetricRow(keys=[key], meaning=meaning, metric=metric))
    return rows


def markdown_table(which: str) -> str:
    """Return a list as a table in Markdown, for the site; `which` is as for `list_metric_rows`."""
    lines = ["| key | meaning |", "|---|---|"]
    section = ""
    for row in list_metric_rows(which):
        if row.metric.section != section:
            section = row.metric.section
            lines.append(f"| | **{section}** |")
        keys = ", ".join(f"`{key}`" for key in row.keys)
        if row.metric.numbered:
            keys += " …"
        # An unescaped bar would end the cell.
        meaning = row.meaning.replace("|", r"\|")
        lines.append(f"| {keys} | {meaning} |")
    return "\n".join(lines)
