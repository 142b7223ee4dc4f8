"""What changed first in a run: over all that it logged, the steps from which a value left the range that it had."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy
import pandas
from numpy.lib.stride_tricks import sliding_window_view

from verl_clipx.runs import keys

LASTING, FEWEST, MOST = 3, 5, 10
"""A value left its range if for three steps it lies beyond all of the 5 to 10 steps before. In a log of more than 300
steps it is a hundredth of them, and longer windows are tried too, up to a tenth: a slow change shows only there."""

AT_ONCE, ON_THE_WAY = 2.0, 4.0
"""By how many widths of that range it lies beyond it, at once or after as many steps on the way as it must last: a
trend widens the range that it leaves. Chosen on the healthy logs of docs/dev/diagnosis_evidence.md."""

PART = 0.25
"""The medians before and after differ by at least this part of the greater: less changes no decision."""

# So many steps, and so many values of each, are printed.
SHOWN_STEPS, SHOWN = 6, 3

# Time, throughput and counters, by how their keys begin; W&B's own keys begin with an underscore.
CLOCKS = ("timing", "perf/", "training/global_step", "training/epoch", "_")


class Change(NamedTuple):
    """A metric that left its range: the first step beyond it, its median before, and the furthest one afterwards."""

    key: str
    step: int
    before: float
    after: float


def is_clock(key: str) -> bool:
    """Whether a metric says only how fast a run is, or how far."""
    return key.startswith(CLOCKS)


def changes(log: pandas.DataFrame) -> list[Change]:
    """The first change of each metric, by step, and in a step those that a page draws before the others.

    Args:
        log: a row a step, a column a metric; values that are not finite are left out.
    """
    columns = {key: log[key][(log.index > 0) & numpy.isfinite(log[key])] for key in log if not is_clock(key)}
    found = [change for key, values in columns.items() if len(values) and (change := _first_change(key, values))]
    return sorted(found, key=lambda one: (one.step, one.key not in keys.DRAWN))


def step_lines(found: Iterable[Change]) -> list[str]:
    """A line for each of the first steps with changes."""
    steps: dict[int, list[str]] = {}
    for one in found:
        steps.setdefault(one.step, []).append(f"{one.key} {one.before:.3g} → {one.after:.3g}")
    return [f"  step {step}: {list_first(texts)}" for step, texts in steps.items()][:SHOWN_STEPS]


def list_first(texts: list[str]) -> str:
    """The first of some texts, and how many more there are."""
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "; ".join(texts[:SHOWN] + more)


def _first_change(key: str, values: pandas.Series) -> Change | None:
    lasting, found = max(LASTING, len(values) // 100), []
    while lasting <= max(LASTING, len(values) // 10):
        found += _changes_over(key, values, lasting)
        lasting *= 2
    return min(found, key=lambda change: change.step, default=None)


def _changes_over(key: str, values: pandas.Series, lasting: int) -> Iterator[Change]:
    """The first change that lasts for so many steps: one at once, and one that is as many steps on the way."""
    x, most, fewest = values.to_numpy(float), MOST * lasting // LASTING, FEWEST * lasting // LASTING
    # Of each step the window that ends there, and the one that begins there; NaN where they have too few steps.
    before = sliding_window_view(numpy.pad(x, (most - 1, 0), constant_values=numpy.nan), most)
    after = sliding_window_view(numpy.pad(x, (0, lasting - 1), constant_values=numpy.nan), lasting)
    lowest, highest = (of(before, axis=1) for of in (numpy.nanmin, numpy.nanmax))
    lowest[: fewest - 1] = numpy.nan
    for way, widths in ((0, AT_ONCE), (lasting, ON_THE_WAY)):
        low, high = (numpy.pad(one, (1 + way, 0), constant_values=numpy.nan)[: len(x)] for one in (lowest, highest))
        width = high - low
        beyond = numpy.maximum(after.min(axis=1) - high, low - after.max(axis=1))
        for at in numpy.flatnonzero((beyond > 0) & (beyond >= widths * width)):
            left = at - way
            level = float(numpy.median(x[max(0, left - most) : left]))
            later = numpy.median(sliding_window_view(x[at:], lasting), axis=1)
            if abs(later[0] - level) < PART * max(abs(level), abs(later[0])):
                continue
            near = (x[left:at] >= low[at] - width[at]) & (x[left:at] <= high[at] + width[at])
            left += int(numpy.flatnonzero(near)[-1]) + 1 if near.any() else 0
            yield Change(key, int(values.index[left]), level, float(later[numpy.abs(later - level).argmax()]))
            break
