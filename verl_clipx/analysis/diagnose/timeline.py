"""What changed first in a run: over all that it logged, where a value jumped and stayed, rose fourfold, or spiked."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy
import pandas
from numpy.lib.stride_tricks import sliding_window_view

from verl_clipx.analysis.runs import keys

LASTING = 3
"""A jump stays if this many steps in a row lie outside the range of the steps before it.

A log of more than 300 steps is searched several times, since only longer windows show slower changes: the jump must
stay for a hundredth of the steps, then for twice as many, and so on up to a tenth of them. FEWEST and MOST grow in
proportion."""

FEWEST = 5
MOST = 10
"""The range is that of the last MOST steps. At the beginning of a log it is of at least FEWEST steps."""

AT_ONCE = 2.0
ON_THE_WAY = 4.0
"""A jump goes beyond the range by at least this many times the range's width: AT_ONCE if it comes from one step to the
next, ON_THE_WAY if it takes as many steps on the way as it must stay. The latter is larger because a trend widens the
range itself. Both were chosen on the healthy logs of docs/dev/diagnosis_evidence.md."""

PART = 0.25
"""The medians before and after a jump differ by at least this part of the larger one: less changes no decision."""

FOURFOLD = 4.0
WITHIN = 15
"""A value rose fourfold if LASTING steps in a row lie at or above FOURFOLD times the highest of FEWEST earlier steps,
and no more than WITHIN steps after these."""

SPIKE = 3.0
"""A spike is a step that reaches SPIKE times the largest size of all steps before it, of which there are at least
FEWEST.

The runs of docs/results/reversal.md that are not among the healthy logs often have smaller ones. This multiple was
fixed on them. The beginning of a change that stays is no spike."""

ROUNDING = 1e-5
"""A rise or a spike to less than this is not reported, since rounding may cause it."""

OF_EITHER_SIGN = 0.1
"""A value goes around 0, as the loss does, if at least this part of its steps has the rarer sign. Multiples of such a
value say nothing, so it neither rises nor spikes. And a few steps near 0 are no range that a jump could leave."""

ABOVE_NOISE = 4.0
"""A jump of a value that goes around 0 is at least this many standard deviations of its noise."""

SOUGHT = f"jumped and stayed, rose fourfold within {WITHIN} logged steps, or spiked to {SPIKE:g} times all before"

# The lines of `format_steps` are of this many steps at most.
SHOWN_STEPS = 6
# A list in a sentence names at most this many items.
SHOWN = 3

# Time, throughput and counters, by how their keys begin; W&B's own keys begin with an underscore.
CLOCKS = ("timing", "perf/", "training/global_step", "training/epoch", "_")


class Change(NamedTuple):
    """A metric that left its range, for good or in a spike.

    Args:
        key: the metric's key.
        step: the first step outside its range.
        before: the level before that step. For a spike: the largest size of any earlier value.
        after: the level after it that is furthest from the one before. For a spike: the value at the spike.
        stays: whether the metric stayed outside; False for a spike.
    """

    key: str
    step: int
    before: float
    after: float
    stays: bool = True


def is_clock(key: str) -> bool:
    """Return whether a metric says only how fast a run is, or how far."""
    return key.startswith(CLOCKS)


def find_changes(log: pandas.DataFrame, *, jumps_only: bool = False) -> list[Change]:
    """Return the first change of each metric, and its first spike if that comes before the change.

    Args:
        log: a row for each step, a column for each metric. Values that are not finite are left out.
        jumps_only: whether to look for jumps alone. In differences of metrics there is nothing else to look for: they
            may have either sign, so that their multiples say nothing.

    Returns:
        The changes in the order of their steps. At one step, metrics with a figure on the page come first.
    """
    found: list[Change] = []
    for key in log:
        if not is_clock(key):
            values = log[key][(log.index > 0) & numpy.isfinite(log[key])]
            found += _find_changes_of(key, values, jumps_only=jumps_only or goes_around_zero(key, values))
    # False sorts before True.
    return sorted(found, key=lambda change: (change.step, change.key not in keys.DRAWN))


def _find_changes_of(key: str, values: pandas.Series, *, jumps_only: bool) -> list[Change]:
    """Return a metric's first spike, if it comes before any change that stays, and its first such change."""
    lasting = list(_find_jumps(key, values))
    if not lasting and not jumps_only:
        lasting = list(_find_rise(key, values))
    first = min(lasting, key=lambda change: change.step, default=None)
    spikes = [] if jumps_only else list(_find_spike(key, values))
    if first is None:
        return spikes
    earlier_spikes = [spike for spike in spikes if spike.step < first.step]
    return [*earlier_spikes, first]


def goes_around_zero(key: str, values: pandas.Series) -> bool:
    """Return whether a metric is the loss, or has each sign in at least OF_EITHER_SIGN of its steps."""
    if key == keys.LOSS:
        return True
    rarer_sign = min((values > 0).sum(), (values < 0).sum())
    return bool(rarer_sign > 0 and rarer_sign >= OF_EITHER_SIGN * len(values))


def format_steps(ordered_changes: Iterable[Change]) -> list[str]:
    """Return a line for each of the first SHOWN_STEPS steps with changes."""
    steps: dict[int, list[str]] = {}
    for change in ordered_changes:
        text = f"{change.key} {change.before:.3g} → {change.after:.3g}"
        if not change.stays:
            text += " (a spike)"
        steps.setdefault(change.step, []).append(text)
    return [f"  step {step}: {join_first(texts)}" for step, texts in steps.items()][:SHOWN_STEPS]


def join_first(texts: list[str]) -> str:
    """Return the first SHOWN of some texts, separated by semicolons, and how many more there are."""
    shown = texts[:SHOWN]
    if len(texts) > SHOWN:
        shown.append(f"and {len(texts) - SHOWN} more")
    return "; ".join(shown)


def _find_spike(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yield a metric's first spike, if it has one."""
    largest_before = values.abs().cummax().shift()[FEWEST:]
    later = values[FEWEST:]
    is_spike = (largest_before > 0) & (later >= SPIKE * largest_before) & (later >= ROUNDING)
    if is_spike.any():
        step = is_spike.idxmax()
        yield Change(key, step=int(step), before=float(largest_before[step]), after=float(later[step]), stays=False)


def _find_rise(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yield a metric's first rise to FOURFOLD times an earlier level, if there is one.

    A level is the largest size in FEWEST steps in a row. A step is compared with the lowest of the levels that end
    shortly before it: so many steps before that it and the LASTING - 1 steps after it lie within WITHIN steps of the
    level. The rise is dated to the step after the last one at or below that level.
    """
    level_before = values.abs().rolling(FEWEST).max().shift()
    # A level of 0 has no multiples.
    level_before = level_before.where(level_before > 0)
    lowest_level = level_before.rolling(WITHIN - LASTING + 1, min_periods=1).min()
    lowest_from_here = values[::-1].rolling(LASTING).min()[::-1]
    has_risen = (lowest_from_here >= FOURFOLD * lowest_level) & (lowest_from_here >= ROUNDING)
    if has_risen.any():
        risen_at = has_risen.idxmax()
        level = lowest_level[risen_at]
        last_low_place = numpy.flatnonzero(values.loc[:risen_at] <= level)[-1]
        highest_after = values.loc[risen_at:].rolling(LASTING).median().max()
        yield Change(
            key,
            step=int(values.index[last_low_place + 1]),
            before=float(level),
            after=float(highest_after),
        )


def _find_jumps(key: str, values: pandas.Series) -> Iterator[Change]:
    """Yield lasting jumps of a metric: for each length of windows the first at once, and the first over some steps."""
    if values.empty:
        return
    least_change = _least_jump_around_zero(key, values)
    lasting = max(LASTING, len(values) // 100)
    longest = max(LASTING, len(values) // 10)
    while lasting <= longest:
        at_once = _find_first_jump(key, values, lasting, least_change, steps_on_way=0, least_widths=AT_ONCE)
        if at_once is not None:
            yield at_once
        over_steps = _find_first_jump(key, values, lasting, least_change, steps_on_way=lasting, least_widths=ON_THE_WAY)
        if over_steps is not None:
            yield over_steps
        lasting *= 2


def _least_jump_around_zero(key: str, values: pandas.Series) -> float:
    """Return the least jump that counts for a metric that goes around 0; 0 for other metrics, where PART says it."""
    if not goes_around_zero(key, values):
        return 0.0
    # With normal noise, neighbours differ by 2 / sqrt(pi) standard deviations on average.
    return float(ABOVE_NOISE * values.diff().abs().mean() * numpy.sqrt(numpy.pi) / 2)


def _find_first_jump(
    key: str, values: pandas.Series, lasting: int, least_change: float, *, steps_on_way: int, least_widths: float
) -> Change | None:
    """Return the first jump of a metric out of the range of the steps before it; None if there is none.

    Each place in the log is tried as the one where the steps after a jump begin. Before it lie the steps on the way,
    and before these the steps of the range. There is a jump if the first `lasting` steps from the place on all lie
    above the range, or all below it.

    Args:
        key: the metric's key.
        values: its finite values by step.
        lasting: how many steps the jump must last. The range is of MOST / LASTING times as many steps, and at the
            beginning of a log of at least FEWEST / LASTING times as many.
        least_change: how much the medians before and after must differ, whatever their size.
        steps_on_way: how many steps may lie on the way, neither in the range nor among those that follow.
        least_widths: how far beyond the range the steps that follow must lie, in widths of the range.
    """
    numbers = values.to_numpy(float)
    range_steps = MOST * lasting // LASTING
    least_range_steps = FEWEST * lasting // LASTING
    # At each place the range of the steps before the way that leads to it; NaN where there are too few of them.
    steps_before = values.rolling(range_steps, min_periods=least_range_steps)
    low = steps_before.min().shift(1 + steps_on_way).to_numpy()
    high = steps_before.max().shift(1 + steps_on_way).to_numpy()
    width = high - low
    # At each place the lowest and the highest of the steps that begin there; NaN where the log ends before.
    steps_after = values[::-1].rolling(lasting)
    lowest_after = steps_after.min()[::-1].to_numpy()
    highest_after = steps_after.max()[::-1].to_numpy()
    # How far all these steps lie above the range, or below it; negative where some lie within.
    distance = numpy.maximum(lowest_after - high, low - highest_after)
    for place in numpy.flatnonzero((distance > 0) & (distance >= least_widths * width)):
        way_begins = place - steps_on_way
        level_before = float(numpy.median(numbers[max(0, way_begins - range_steps) : way_begins]))
        levels_after = numpy.median(sliding_window_view(numbers[place:], lasting), axis=1)
        larger_level = max(abs(level_before), abs(levels_after[0]))
        if abs(levels_after[0] - level_before) < max(least_change, PART * larger_level):
            continue
        # The jump begins after the last step on the way that is still within a width of the range.
        on_way = numbers[way_begins:place]
        is_near = (on_way >= low[place] - width[place]) & (on_way <= high[place] + width[place])
        onset = way_begins
        if is_near.any():
            onset += int(numpy.flatnonzero(is_near)[-1]) + 1
        furthest_level = levels_after[numpy.abs(levels_after - level_before).argmax()]
        return Change(key, step=int(values.index[onset]), before=level_before, after=float(furthest_level))
    return None
