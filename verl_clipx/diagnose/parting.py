"""Two runs: the first step at which one leaves the other."""

from typing import NamedTuple

import numpy

from verl_clipx.diagnose.timeline import Change, changes, is_clock, step_lines
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

# Values nearer to each other than this part of them are alike, up to rounding.
ROUNDING = 1e-6
SHOWN = 4


class Parting(NamedTuple):
    """Where two runs part.

    Args:
        steps: the training steps that both logged.
        step: the first of them with a metric that differs; None if all are alike.
        values: the metrics that differ there, and both runs' values.
        same_samples: whether they began with the same samples, so that a difference says more than chance.
        changes: in the metrics' differences; empty for runs with the same samples.
    """

    one: str
    two: str
    steps: list[int]
    step: int | None
    values: dict[str, tuple[float, float]]
    same_samples: bool
    changes: list[Change]


def part(one: Run, two: Run) -> Parting:
    """Compares two runs step by step, over the metrics that both log, clocks left out.

    Runs have the same samples if they are alike in the first step, or at least in its reward and response length.

    Raises:
        ValueError: they have no training step or no metric in common.
    """
    drawn = {key: place for place, key in enumerate(keys.DRAWN)}
    common = [key for key in one.log if key in two.log and not is_clock(key)]
    common.sort(key=lambda key: drawn.get(key, len(drawn)))
    steps = [int(step) for step in one.log.index.intersection(two.log.index) if step > 0]
    if not (common and steps):
        raise ValueError(f"{one.name} and {two.name}: no training step and metric that both logged.")
    first, second = (run.log.loc[steps, common] for run in (one, two))
    differs = ~numpy.isclose(first, second, rtol=ROUNDING, atol=0, equal_nan=True)
    at = int(differs.any(axis=1).argmax()) if differs.any() else None
    of_samples = [place for place, key in enumerate(common) if key in (keys.REWARD, keys.LENGTH)]
    same = at != 0 or (len(of_samples) > 0 and not differs[0, of_samples].any())
    values = {
        key: (float(first.iat[at, place]), float(second.iat[at, place]))
        for place, key in enumerate(common)
        if at is not None and differs[at, place]
    }
    step = None if at is None else steps[at]
    return Parting(one.name, two.name, steps, step, values, same, [] if same else changes(second - first))


def say_where(parting: Parting) -> list[str]:
    """A sentence, and lines below it."""
    one, two, steps = parting.one, parting.two, parting.steps
    if parting.step is None:
        return [f"{one} and {two} log the same in all {len(steps)} steps that both have."]
    if parting.same_samples:
        shown = "; ".join(f"{key} {a:.6g} and {b:.6g}" for key, (a, b) in list(parting.values.items())[:SHOWN])
        more = f"; and {len(parting.values) - SHOWN} more" if len(parting.values) > SHOWN else ""
        how = "begin with the same samples" if parting.step == steps[0] else "log the same in every step before"
        return [f"{one} and {two} part at step {parting.step}, and {how}: {shown}{more}."]
    differ = f"{one} and {two} differ from step {steps[0]} on, as runs with other samples do, so no single value says"
    differ = f"{differ} where they part. Their difference, {two} minus {one},"
    if not parting.changes:
        return [f"{differ} never left its range: this can't be told from noise."]
    return [f"{differ} left its range:", *step_lines(parting.changes)]
