"""Lists of every metric that a run may log, for `clipx metrics`, the site and the report's charts."""

from collections.abc import Iterable
from typing import NamedTuple

from verl_clipx.losses.applying.observed import OBSERVED_METRICS
from verl_clipx.losses.base.metric import Metric
from verl_clipx.losses.base.shared_metrics import METRICS
from verl_clipx.losses.methods import BUILT_IN, METHODS

# What most readers look for comes first, what only few need last.
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
LISTS = ("default", "observe")


class Row(NamedTuple):
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
    """Each metric that runs with some methods may log, with the name of its method, empty for a shared metric."""
    of_methods = [(name, metric) for name in methods for metric in METHODS[name].logs]
    return [("", metric) for metric in METRICS] + of_methods


def rows_of(which: str) -> list[Row]:
    """The rows of a list.

    Args:
        which: "default" for what runs log, "observe" for what +clipx=observe logs with another meaning.
    """
    if which == "observe":
        shared = {id(metric) for metric in METRICS}
        entries = [("", metric) for metric in OBSERVED_METRICS if id(metric) not in shared]
    else:
        entries = every_metric(BUILT_IN)
    return merge(sorted(entries, key=lambda entry: SECTIONS.index(entry[1].section)))


def merge(entries: Iterable[tuple[str, Metric]]) -> list[Row]:
    """Merges neighbours with the same section and meaning, given with their method's name or "", into one row."""
    rows: list[Row] = []
    for method, metric in entries:
        meaning = f"{method.upper()}: {metric.meaning}" if method else metric.meaning
        key = metric.key.removeprefix("actor/")
        if metric.numbered:
            # One metric of several, such as one a bin; the first stands for all of them.
            key += f"/{metric.numbered}_0"
        if rows and (rows[-1].metric.section, rows[-1].meaning) == (metric.section, meaning):
            rows[-1].keys.append(key)
        else:
            rows.append(Row(keys=[key], meaning=meaning, metric=metric))
    return rows


def markdown_table(which: str) -> str:
    """A table in Markdown, for the site; `which` is as for `rows_of`."""
    lines = ["| key | meaning |", "|---|---|"]
    section = ""
    for row in rows_of(which):
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
