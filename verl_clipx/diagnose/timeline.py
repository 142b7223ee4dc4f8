"""What changed first in a run: over all that it logged, where a value jumped and stayed, rose fourfold, or spiked."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy
import pandas
from numpy.lib.stride_tricks import sliding_window_view

from verl_clipx.runs import keys

LASTING, FEWEST, MOST = 3, 5, 10
"""A value jumped and stayed if for three steps it lies beyond all of the 5 to 10 before. In a log of more than 300
steps it is a hundredth of them, and longer windows are tried too, up to a tenth: a slow change shows only there."""

AT_ONCE, ON_THE_WAY = 2.0, 4.0
"""So many widths of that range it lies beyond it, at once or after as many steps on the way as it must last: a
trend widens the range that it leaves. Chosen on the healthy logs of docs/dev/diagnosis_evidence.md."""

PART = 0.25
"""The medians before and after differ by at least this part of the greater: less changes no decision."""

FOURFOLD, WITHIN = 4.0, 15
"""A value rose fourfold if three in a row lie at or above four times the highest of 5, within the 15 after them."""

SPIKE = 3.0
"""It spiked if a step reaches three times the greatest size of all before, at least 5: less is usual in the runs of the
table reversal that are not among the healthy logs, on which this was fixed. What begins what stays is no spike."""

ROUNDING = 1e-5
"""Rises and spikes to less than this are not looked at: so much may be left by rounding."""

SOUGHT = f"jumped and stayed, rose fourfold within {WITHIN} logged steps, or spiked to {SPIKE:g} times all before"

# So many steps, and so many values of each, are printed.
SHOWN_STEPS, SHOWN = 6, 3

# Time, throughput and counters, by how their keys begin; W&B's own keys begin with an underscore.
CLOCKS = ("timing", "perf/", "training/global_step", "training/epoch", "_")


class Change(NamedTuple):
    """A metric that left its range: from which step, its level before, and the furthest afterwards; or a spike."""

    key: str
    step: int
    before: float
    after: float
    stays: bool = True


def is_clock(key: str) -> bool:
    """Returns whether a metric says only how fast a run is, or how far."""
    return key.startswith(CLOCKS)


def changes(log: pandas.DataFrame, *, jumps_only: bool = False) -> list[Change]:
    """Returns each metric's first change and first spike before it, by step; in a step those that a page draws first.

    Args:
        log: a row a step, a column a metric; values that are not finite are left out.
        jumps_only: for what may have either sign, whose multiples say nothing.
    """
    columns = {key: log[key][(log.index > 0) & numpy.isfinite(log[key])] for key in log if not is_clock(key)}
    found: list[Change] = []
    for key, values in columns.items():
        lasting = [*_jumps(key, values)] or ([] if jumps_only else [*_rises(key, values)])
        first = min(lasting, key=lambda change: change.step, default=None)
        spikes = [] if jumps_only else [one for one in _spikes(key, values) if first is None or one.step < first.step]
        found += [*spikes, *([first] if first else [])]
    return sorted(found, key=lambda one: (one.step, one.key not in keys.DRAWN))


def step_lines(found: Iterable[Change]) -> list[str]:
    """Returns a line for each of the first steps with changes."""
    steps: dict[int, list[str]] = {}
    for one in found:
        once = "" if one.stays else " (a spike)"
        steps.setdefault(one.step, []).append(f"{one.key} {one.before:.3g} → {one.after:.3g}{once}")
    return [f"  step {step}: {list_first(texts)}" for step, texts in steps.items()][:SHOWN_STEPS]


def list_first(texts: list[str]) -> str:
    """Returns the first of some texts, and how many more there are."""
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "; ".join(texts[:SHOWN] + more)


def _spikes(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the first step that reaches a multiple of all before."""
    highest, later = values.abs().cummax().shift()[FEWEST:], values[FEWEST:]
    for at in later.index[(highest > 0) & (later >= SPIKE * highest) & (later >= ROUNDING)][:1]:
        yield Change(key, int(at), float(highest[at]), float(later[at]), stays=False)


def _rises(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the first rise by a multiple of five steps before, dated after the last step that is as low as these."""
    highest, least = values.abs().rolling(FEWEST).max().shift(), values[::-1].rolling(LASTING).min()[::-1]
    before = highest.where(highest > 0).rolling(WITHIN - LASTING + 1, min_periods=1).min()
    for at in values.index[(least >= FOURFOLD * before) & (least >= ROUNDING)][:1]:
        step = values.index[numpy.flatnonzero(values.loc[:at] <= before[at])[-1] + 1]
        yield Change(key, int(step), float(before[at]), float(values.loc[at:].rolling(LASTING).median().max()))


def _jumps(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the jumps that last, over windows of each length."""
    lasting = max(LASTING, len(values) // 100)
    while len(values) and lasting <= max(LASTING, len(values) // 10):
        yield from _changes_over(key, values, lasting)
        lasting *= 2


def _changes_over(key: str, values: pandas.Series, lasting: int) -> Iterator[Change]:
    """Yields the first change that lasts for so many steps: one at once, and one that is as many steps on the way."""
    x, most, fewest = values.to_numpy(float), MOST * lasting // LASTING, FEWEST * lasting // LASTING
    # Of each step the window that ends there, and the one that begins there; NaN where they have too few steps.
    before, after = values.rolling(most, min_periods=fewest), values[::-1].rolling(lasting)
    least, greatest = after.min()[::-1], after.max()[::-1]
    for way, widths in ((0, AT_ONCE), (lasting, ON_THE_WAY)):
        low, high = (of.shift(1 + way).to_numpy() for of in (before.min(), before.max()))
        width = high - low
        beyond = numpy.maximum(least - high, low - greatest)
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
