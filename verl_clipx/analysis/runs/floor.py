"""How much of a run's clipping is no more than rounding gives, by counts of tokens.

The floor of a rollout batch is what its first update clips, at weights that have not moved: docs/floor.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.statistics.rates import chance_of_as_many

# How often chance alone may give as many more clipped tokens as are taken for more than rounding.
LEVEL = 1e-3
# What bounds can hold, by the names of `losses.modifiers.hold`, which needs torch.
CLIP_FRACTION = "clip_fraction"
SECOND_MOMENT = "second_moment"


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
    """Returns whether a run's record says that its engine computes in float32, whose floor is 0."""
    return run.record.training.precision == "float32"


def clipped_by_step(run: Run) -> pandas.DataFrame:
    """Returns the numbers of clipped and of all tokens in the first update of each step, and in its later updates.

    A row a step, with the columns `floor_clipped`, `floor_tokens`, `later_clipped` and `later_tokens`. It is empty for
    a run that logged no floor or no clip fractions, whose updates are unknown, which has Lopti's passes, of unequal
    sizes, or which holds a clip fraction: its bounds follow what rounding moves too, and every update clips as much.
    """
    updates = run.schedule.updates_on_batch
    tokens = keys.of_bins("floor/tokens", run.log.columns)
    shares = {keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH}
    is_logged = tokens and shares <= {*run.log.columns}
    if not updates or run.schedule.passes or not is_logged or held_target(run) == CLIP_FRACTION:
        return pandas.DataFrame(columns=["floor_clipped", "floor_tokens", "later_clipped", "later_tokens"])
    of_update = run.log[tokens].sum(axis=1, min_count=1)
    of_all = run.log[[keys.CLIPPED_LOW, keys.CLIPPED_HIGH]].sum(axis=1, min_count=2)
    of_first = run.log[[keys.FLOOR_LOW, keys.FLOOR_HIGH]].sum(axis=1, min_count=2)
    # verl logs the mean over the updates.
    of_later = (of_all * updates - of_first).clip(lower=0)
    table = pandas.DataFrame(
        {
            "floor_clipped": of_first * of_update,
            "floor_tokens": of_update,
            "later_clipped": of_later * of_update,
            "later_tokens": (updates - 1) * of_update,
        }
    )
    return table[table.index > 0].dropna()


def recut_floor(run: Run) -> Clipped | None:
    """Returns what the second measurement of the floor clipped; None if it was not made."""
    tokens = keys.of_bins("floor_recut/tokens", run.log.columns)
    if not tokens or not {keys.RECUT_LOW, keys.RECUT_HIGH} <= {*run.log.columns}:
        return None
    measured = run.log[[*tokens, keys.RECUT_LOW, keys.RECUT_HIGH]].dropna()
    if measured.empty:
        return None
    # A run that was resumed measured it anew.
    of_each = measured[tokens].sum(axis=1)
    clipped = (measured[keys.RECUT_LOW] + measured[keys.RECUT_HIGH]) * of_each
    return Clipped(float(clipped.sum()), float(of_each.sum()))


def floors_of(run: Run, table: pandas.DataFrame) -> list[Clipped]:
    """Returns the floor over the steps of a table of `clipped_by_step` and, if it was made, its second measurement."""
    first = Clipped(float(table.floor_clipped.sum()), float(table.floor_tokens.sum()))
    second = recut_floor(run)
    return [first] if second is None else [first, second]


def held_target(run: Run) -> str | None:
    """Returns which target the bounds of a run hold; None if they hold none."""
    hold = run.record.loss.modifiers.get("hold")
    return hold.get("target", CLIP_FRACTION) if hold else None


def target_of_rounding(run: Run) -> float | None:
    """Returns what the held target is where rounding alone moves the ratio, over all steps.

    It is the larger of the floor's two measurements. None if the run holds no target or logged no floor.
    """
    target = held_target(run)
    shares = {"floor": (keys.FLOOR_LOW, keys.FLOOR_HIGH), "floor_recut": (keys.RECUT_LOW, keys.RECUT_HIGH)}
    measured: list[float] = []
    for floor, clipped in shares.items():
        tokens = keys.of_bins(f"{floor}/tokens", run.log.columns)
        squares = keys.of_bins(f"{floor}/squared_sum", run.log.columns)
        if target == CLIP_FRACTION and {*clipped} <= {*run.log.columns}:
            measured.append(float(run.log[[*clipped]].sum(axis=1, min_count=2).mean()))
        if target == SECOND_MOMENT and tokens and squares:
            measured.append(float(run.log[squares].sum().sum() / run.log[tokens].sum().sum()))
    return max(measured, default=None)


def later_updates(table: pandas.DataFrame) -> Clipped:
    """Returns what the later updates of a table of `clipped_by_step` clipped."""
    return Clipped(float(table.later_clipped.sum()), float(table.later_tokens.sum()))


def exceeds(first: Clipped, second: Clipped) -> bool:
    """Returns whether a larger share of the first tokens was clipped, by a count that chance doesn't explain.

    Tokens of a sequence are not independent, so the level is a small one.
    """
    return chance_of_as_many(first.clipped, first.tokens, second.clipped, second.tokens) < LEVEL


def could_exceed(clipped: Clipped, floor: Clipped) -> bool:
    """Returns whether a floor of as many tokens would be exceeded if none of them had been clipped."""
    return exceeds(clipped, Clipped(0, floor.tokens))


def joined(floors: Sequence[Clipped]) -> Clipped:
    """Returns what both measurements of the floor clipped together, or the second one where it exceeds the first.

    The second one is of few tokens, as it is made once: by itself it says little where it doesn't exceed the first.
    """
    first, *others = floors
    for second in others:
        if exceeds(second, first):
            return second
        first = Clipped(first.clipped + second.clipped, first.tokens + second.tokens)
    return first
