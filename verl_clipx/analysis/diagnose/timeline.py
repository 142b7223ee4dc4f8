"""What changed first in a run: over all that it logged, where a value jumped and stayed, rose fourfold, or spiked."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy
import pandas
from numpy.lib.stride_tricks import sliding_window_view

from verl_clipx.analysis.runs import keys

LASTING = 3
FEWEST = 5
MOST = 10
"""A value jumped and stayed if for three steps it lies beyond all of the 5 to 10 before. In a log of more than 300
steps it is a hundredth of them, and longer windows are tried too, up to a tenth: a slow change shows only there."""

AT_ONCE = 2.0
ON_THE_WAY = 4.0
"""So many widths of that range it lies beyond it, at once or after as many steps on the way as it must last: a
trend widens the range that it leaves. Chosen on the healthy logs of docs/dev/diagnosis_evidence.md."""

PART = 0.25
"""The medians before and after differ by at least this part of the greater: less changes no decision."""

FOURFOLD = 4.0
WITHIN = 15
"""A value rose fourfold if three in a row lie at or above four times the highest of 5, within the 15 after them."""

SPIKE = 3.0
"""It spiked if a step reaches three times the greatest size of all before, at least 5: less is usual in the runs of the
table reversal that are not among the healthy logs, on which this was fixed. What begins what stays is no spike."""

ROUNDING = 1e-5
"""Rises and spikes to less than this are not looked at: so much may be left by rounding."""

OF_EITHER_SIGN = 0.1
"""A value goes around 0 if at least this part of its steps has the rarer sign, as the loss has. Its multiples say
nothing, so it neither rises nor spikes, and a few steps near 0 are no range that a level could leave."""

ABOVE_NOISE = 4.0
"""A jump of a value that goes around 0 is this many standard deviations, by the differences of neighbouring steps."""

SOUGHT = f"jumped and stayed, rose fourfold within {WITHIN} logged steps, or spiked to {SPIKE:g} times all before"

# So many steps, and so many values of each, are printed.
SHOWN_STEPS = 6
SHOWN = 3

# Time, throughput and counters, by how their keys begin; W&B's own keys begin with an underscore.
CLOCKS = ("timing", "perf/", "training/global_step", "training/epoch", "_")


class Change(NamedTuple):
    """A metric that left its range, for good or in a spike.

    Args:
        key: of the metric.
        step: the first one outside its range.
        before: the level before; before a spike, the greatest size of any earlier value.
        after: the furthest afterwards, or the spike.
        stays: whether it stayed there; False for a spike.
    """

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
    by_metric: list[Change] = []
    for key in log:
        if not is_clock(key):
            values = log[key][(log.index > 0) & numpy.isfinite(log[key])]
            by_metric += _changes_of(key, values, jumps_only=jumps_only or goes_around_zero(key, values))
    return sorted(by_metric, key=lambda change: (change.step, change.key not in keys.DRAWN))


def _changes_of(key: str, values: pandas.Series, *, jumps_only: bool) -> list[Change]:
    """Returns a metric's first spike, if it comes before any change that stays, and its first such change."""
    lasting = list(_jumps(key, values))
    if not lasting and not jumps_only:
        lasting = list(_rises(key, values))
    first = min(lasting, key=lambda change: change.step, default=None)
    spikes = [] if jumps_only else list(_spikes(key, values))
    if first is None:
        return spikes
    return [*(spike for spike in spikes if spike.step < first.step), first]


def goes_around_zero(key: str, values: pandas.Series) -> bool:
    """Returns whether a metric is the loss, or has both signs, neither of them in a few steps only."""
    if key == keys.LOSS:
        return True
    rarer_sign = min((values > 0).sum(), (values < 0).sum())
    return bool(rarer_sign > 0 and rarer_sign >= OF_EITHER_SIGN * len(values))


def step_lines(ordered_changes: Iterable[Change]) -> list[str]:
    """Returns a line for each of the first steps with changes."""
    steps: dict[int, list[str]] = {}
    for change in ordered_changes:
        once = "" if change.stays else " (a spike)"
        steps.setdefault(change.step, []).append(f"{change.key} {change.before:.3g} → {change.after:.3g}{once}")
    return [f"  step {step}: {list_first(texts)}" for step, texts in steps.items()][:SHOWN_STEPS]


def list_first(texts: list[str]) -> str:
    """Returns the first of some texts, and how many more there are."""
    shown = texts[:SHOWN]
    if len(texts) > SHOWN:
        shown.append(f"and {len(texts) - SHOWN} more")
    return "; ".join(shown)


def _spikes(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the first step that reaches a multiple of all before."""
    highest = values.abs().cummax().shift()[FEWEST:]
    later = values[FEWEST:]
    spiked = later.index[(highest > 0) & (later >= SPIKE * highest) & (later >= ROUNDING)]
    if len(spiked):
        step = spiked[0]
        yield Change(key, step=int(step), before=float(highest[step]), after=float(later[step]), stays=False)


def _rises(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the first rise, if any, to FOURFOLD times the level before.

    The level is the highest of FEWEST steps, the lowest such within WITHIN steps. The rise is dated to the step after
    the last one at that level.
    """
    highest_before = values.abs().rolling(FEWEST).max().shift()
    lowest_from_here = values[::-1].rolling(LASTING).min()[::-1]
    levels = highest_before.where(highest_before > 0).rolling(WITHIN - LASTING + 1, min_periods=1).min()
    risen = values.index[(lowest_from_here >= FOURFOLD * levels) & (lowest_from_here >= ROUNDING)]
    if len(risen):
        level = levels[risen[0]]
        last_low = numpy.flatnonzero(values.loc[: risen[0]] <= level)[-1]
        furthest = values.loc[risen[0] :].rolling(LASTING).median().max()
        yield Change(key, step=int(values.index[last_low + 1]), before=float(level), after=float(furthest))


def _jumps(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yields the changes that last, each the first one over windows of one length."""
    least_change = _noise_around_zero(key, values)
    lasting = max(LASTING, len(values) // 100)
    longest = max(LASTING, len(values) // 10)
    while len(values) and lasting <= longest:
        yield from _changes_over(key, values, lasting, least_change)
        lasting *= 2


def _noise_around_zero(key: str, values: pandas.Series) -> float:
    """Returns what a jump of a value around 0 must exceed, 0 for other values, whose own size is their measure."""
    if not goes_around_zero(key, values):
        return 0.0
    # With normal noise, neighbours differ by 2 / sqrt(pi) standard deviations on average.
    return float(ABOVE_NOISE * values.diff().abs().mean() * numpy.sqrt(numpy.pi) / 2)


def _changes_over(key: str, values: pandas.Series, lasting: int, least_change: float) -> Iterator[Change]:
    """Yields the first change that lasts for so many steps: one at once, and one that is as many steps on the way."""
    numbers = values.to_numpy(float)
    most = MOST * lasting // LASTING
    fewest = FEWEST * lasting // LASTING
    # Of each step the window that ends there, and the one that begins there; NaN where they have too few steps.
    before = values.rolling(most, min_periods=fewest)
    after = values[::-1].rolling(lasting)
    least = after.min()[::-1]
    greatest = after.max()[::-1]
    for way, widths in ((0, AT_ONCE), (lasting, ON_THE_WAY)):
        low = before.min().shift(1 + way).to_numpy()
        high = before.max().shift(1 + way).to_numpy()
        width = high - low
        beyond = numpy.maximum(least - high, low - greatest)
        for place in numpy.flatnonzero((beyond > 0) & (beyond >= widths * width)):
            left = place - way
            level = float(numpy.median(numbers[max(0, left - most) : left]))
            later = numpy.median(sliding_window_view(numbers[place:], lasting), axis=1)
            change = abs(later[0] - level)
            if change < max(least_change, PART * max(abs(level), abs(later[0]))):
                continue
            near = (numbers[left:place] >= low[place] - width[place]) & (
                numbers[left:place] <= high[place] + width[place]
            )
            if near.any():
                left += int(numpy.flatnonzero(near)[-1]) + 1
            furthest = later[numpy.abs(later - level).argmax()]
            yield Change(key, step=int(values.index[left]), before=level, after=float(furthest))
            break
