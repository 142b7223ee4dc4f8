"""Compares what a run clipped with what rounding alone clips, by counts of tokens.

The floor of a rollout batch is what its first update clips, at weights that have not moved: docs/floor.md.
"""

import math
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.statistics.rates import chance_of_as_many

# The significance level of `exceeds`. The tokens of a sequence are not independent, so it is a small one.
LEVEL = 1e-3
# The targets that `+clipx/hold` can hold, as `losses.modifiers.hold` names them. That module needs torch.
CLIP_FRACTION = "clip_fraction"
SECOND_MOMENT = "second_moment"
# The two measurements of the floor, as they begin the names of their metrics per probability bin.
FIRST_MEASUREMENT = "floor"
SECOND_MEASUREMENT = "floor_recut"


@dataclass(frozen=True)
class Clipped:
    """How many of some tokens were clipped."""

    clipped: float
    tokens: float

    @property
    def share(self) -> float:
        """Returns the clipped share; 0 of no tokens."""
        return self.clipped / self.tokens if self.tokens else 0.0


def computes_in_single_precision(run: Run) -> bool:
    """Return whether a run's record says that its engine computes in float32, whose floor is 0."""
    return run.record.training.precision == "float32"


def count_clipped_by_step(run: Run) -> pandas.DataFrame:
    """Estimate how many tokens the first update of each step clipped, and how many its later updates did.

    Later updates are taken to have as many tokens as the first one.

    Returns:
        A row for each step, with the columns `floor_clipped` and `floor_tokens` of the first update, and
        `later_clipped` and `later_tokens` of all later updates together. The table is empty if `_can_count_clipped` is
        False.
    """
    token_keys = keys.find_bin_keys(f"{FIRST_MEASUREMENT}/tokens", run.log.columns)
    if not _can_count_clipped(run, token_keys):
        return pandas.DataFrame(columns=["floor_clipped", "floor_tokens", "later_clipped", "later_tokens"])
    updates = run.schedule.updates_on_batch
    tokens_per_update = run.log[token_keys].sum(axis=1, min_count=1)
    mean_share = run.log[[keys.CLIPPED_LOW, keys.CLIPPED_HIGH]].sum(axis=1, min_count=2)
    first_share = run.log[[keys.FLOOR_LOW, keys.FLOOR_HIGH]].sum(axis=1, min_count=2)
    # verl logs the mean of the updates' shares. Times their number, it is the sum of these shares.
    sum_of_later_shares = (mean_share * updates - first_share).clip(lower=0)
    table = pandas.DataFrame(
        {
            "floor_clipped": first_share * tokens_per_update,
            "floor_tokens": tokens_per_update,
            "later_clipped": sum_of_later_shares * tokens_per_update,
            "later_tokens": (updates - 1) * tokens_per_update,
        }
    )
    # Step 0 is a validation before the first training step.
    return table[table.index > 0].dropna()


def _can_count_clipped(run: Run, token_keys: list[str]) -> bool:
    """Return whether a run tells what its first and its later updates clipped.

    Args:
        run: the run.
        token_keys: the keys under which it logged the tokens of the first update.
    """
    if not run.schedule.updates_on_batch:
        return False
    # The passes of Lopti are updates of unequal sizes.
    if run.schedule.passes:
        return False
    # Bounds that hold a clip fraction let every update clip the same share, whatever moves the ratio.
    if held_target(run) == CLIP_FRACTION:
        return False
    read = {keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH}
    return bool(token_keys) and read <= set(run.log.columns)


def measure_floors(run: Run, table: pandas.DataFrame) -> tuple[Clipped, Clipped | None]:
    """Return both measurements of a run's floor: what rounding clipped by each of them.

    Args:
        run: the run.
        table: rows of `count_clipped_by_step`, over which the first measurement is summed.

    Returns:
        What the first updates clipped in these rows, and `sum_second_measurement`, which is of the whole run.
    """
    first = Clipped(clipped=float(table.floor_clipped.sum()), tokens=float(table.floor_tokens.sum()))
    return first, sum_second_measurement(run)


def sum_second_measurement(run: Run) -> Clipped | None:
    """Return what the second measurement of the floor clipped: a pass over the same rows in smaller micro-batches.

    None if it was not made.
    """
    token_keys = keys.find_bin_keys(f"{SECOND_MEASUREMENT}/tokens", run.log.columns)
    if not token_keys or not {keys.RECUT_LOW, keys.RECUT_HIGH} <= set(run.log.columns):
        return None
    # A run measures once after each start. The measurements after all its starts are added.
    measurements = run.log[[*token_keys, keys.RECUT_LOW, keys.RECUT_HIGH]].dropna()
    if measurements.empty:
        return None
    tokens = measurements[token_keys].sum(axis=1)
    clipped = (measurements[keys.RECUT_LOW] + measurements[keys.RECUT_HIGH]) * tokens
    return Clipped(clipped=float(clipped.sum()), tokens=float(tokens.sum()))


def combine_measurements(first: Clipped, second: Clipped | None) -> Clipped:
    """Return one floor from its two measurements: the second where it exceeds the first, otherwise both together.

    The second measurement is made once, so it has few tokens. Where it does not exceed the first, its own share would
    say little.

    Args:
        first, second: from `measure_floors`.
    """
    if second is None:
        return first
    if exceeds(second, first):
        return second
    return Clipped(clipped=first.clipped + second.clipped, tokens=first.tokens + second.tokens)


def count_later_clipped(table: pandas.DataFrame) -> Clipped:
    """Return what the later updates clipped in all rows of a table of `count_clipped_by_step`."""
    return Clipped(clipped=float(table.later_clipped.sum()), tokens=float(table.later_tokens.sum()))


def exceeds(counted: Clipped, reference: Clipped) -> bool:
    """Return whether `counted` clipped a larger share of its tokens than `reference`, by more than chance explains."""
    chance = chance_of_as_many(counted.clipped, counted.tokens, reference.clipped, reference.tokens)
    return chance < LEVEL


def could_exceed(counted: Clipped, reference: Clipped) -> bool:
    """Return whether `counted` would exceed `reference` if `reference`, with as many tokens, had clipped none."""
    return exceeds(counted, Clipped(clipped=0, tokens=reference.tokens))


def held_target(run: Run) -> str | None:
    """Return which target the bounds of a run hold; None if they hold none."""
    hold = run.record.loss.modifiers.get("hold")
    return hold.get("target", CLIP_FRACTION) if hold else None


def measure_target_of_rounding(run: Run) -> float | None:
    """Return the value that a run's held target has from rounding alone, while nothing has moved.

    It is the larger of the floor's two measurements. None if the run holds no target, or logged no finite floor.
    """
    target = held_target(run)
    measured: list[float] = []
    if target == CLIP_FRACTION:
        measured.append(_average_clip_fraction(run.log, keys.FLOOR_LOW, keys.FLOOR_HIGH))
        measured.append(_average_clip_fraction(run.log, keys.RECUT_LOW, keys.RECUT_HIGH))
    if target == SECOND_MOMENT:
        measured.append(_average_squared_log_ratio(run.log, FIRST_MEASUREMENT))
        measured.append(_average_squared_log_ratio(run.log, SECOND_MEASUREMENT))
    return max((value for value in measured if math.isfinite(value)), default=None)


def _average_clip_fraction(log: pandas.DataFrame, low: str, high: str) -> float:
    """Return the clip fraction of a measurement of the floor, averaged over the steps; NaN if it is not logged.

    Args:
        log: a row for each step.
        low, high: the keys of the shares that the measurement clips below and above the bounds.
    """
    if low not in log or high not in log:
        return math.nan
    return float((log[low] + log[high]).mean())


def _average_squared_log_ratio(log: pandas.DataFrame, measurement: str) -> float:
    """Return the mean squared log-ratio of the tokens that were measured in all steps; NaN if it is not logged.

    Args:
        log: a row for each step.
        measurement: FIRST_MEASUREMENT or SECOND_MEASUREMENT.
    """
    token_keys = keys.find_bin_keys(f"{measurement}/tokens", log.columns)
    square_keys = keys.find_bin_keys(f"{measurement}/squared_sum", log.columns)
    measured = log[[*token_keys, *square_keys]].dropna()
    if not token_keys or not square_keys or measured.empty:
        return math.nan
    squares = measured[square_keys].to_numpy(dtype=float)
    tokens = measured[token_keys].to_numpy(dtype=float)
    return float(squares.sum() / tokens.sum()) if tokens.sum() else math.nan
