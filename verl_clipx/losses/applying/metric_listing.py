"""Lists of every metric that a run may log, for `clipx metrics`, the site and the report's charts."""

from collections.abc import Iterable
from typing import NamedTuple

from verl_clipx.losses.applying.observed import OBSERVED_METRICS
from verl_clipx.losses.base.metric import Metric
from verl_clipx.losses.base.shared_metrics import METRICS
from verl_clipx.losses.methods import BUILT_IN, METHODS

# The order of the sections in docs/metrics.md.
SECTIONS = (
    "Health",
    "What was clipped",
    "How far the policy moved",
    "How much is rounding",
    "Where the gradient comes from",
    "The method's own bounds",
    "The run",
    "Stale samples",
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
    own = [(name, metric) for name in methods for metric in METHODS[name].logs]
    return [("", metric) for metric in METRICS] + own


def rows_of(which: str) -> list[Row]:
    """The rows of a list.

    Args:
        which: "default" for what runs log, "observe" for what +clipx=observe logs with another meaning.
    """
    if which == "observe":
        shared = {id(metric) for metric in METRICS}
        found = [("", metric) for metric in OBSERVED_METRICS if id(metric) not in shared]
    else:
        found = every_metric(BUILT_IN)
    return merge(sorted(found, key=lambda entry: SECTIONS.index(entry[1].section)))


def merge(entries: Iterable[tuple[str, Metric]]) -> list[Row]:
    """Merges neighbours with the same section and meaning, given with their method's name or "", into one row."""
    rows: list[Row] = []
    for method, metric in entries:
        meaning = f"{method.upper()}: {metric.meaning}" if method else metric.meaning
        key = metric.key.removeprefix("actor/") + (f"/{metric.numbered}_0" if metric.numbered else "")
        if rows and (rows[-1].metric.section, rows[-1].meaning) == (metric.section, meaning):
            rows[-1].keys.append(key)
        else:
            rows.append(Row([key], meaning, metric))
    return rows


def markdown_table(which: str) -> str:
    """A table in Markdown, for the site; `which` is as for `rows_of`."""
    lines, section = ["| key | meaning |", "|---|---|"], ""
    for row in rows_of(which):
        if row.metric.section != section:
            section = row.metric.section
            lines.append(f"| | **{section}** |")
        keys = ", ".join(f"`{key}`" for key in row.keys) + (" …" if row.metric.numbered else "")
        # An unescaped bar would end the cell.
        meaning = row.meaning.replace("|", r"\|")
        lines.append(f"| {keys} | {meaning} |")
    return "\n".join(lines)
