"""Two runs: the first step at which one leaves the other."""

from typing import NamedTuple

import numpy

from verl_clipx.analysis.diagnose.timeline import Change, changes, is_clock, list_first, step_lines
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run

# Values nearer to each other than this, relatively, are equal.
ROUNDING = 1e-6


class Parting(NamedTuple):
    """The place at which two runs part.

    Args:
        step: the first training step that both logged with a metric that differs; None if there is none.
        values: the metrics that differ there, and both runs' values.
        same_samples: whether they began with the same samples, so that a difference says more than chance.
        changes: in the metrics' differences; empty for runs with the same samples.
    """

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
    common = [key for key in one.log if key in two.log and not is_clock(key)]
    common.sort(key=lambda key: key not in keys.DRAWN)
    steps = [int(step) for step in one.log.index.intersection(two.log.index) if step > 0]
    if not (common and steps):
        raise ValueError(f"{one.name} and {two.name}: no training step and metric that both logged.")
    first, second = (run.log.loc[steps, common] for run in (one, two))
    differs = first.copy().astype(bool)
    differs[:] = ~numpy.isclose(first, second, rtol=ROUNDING, atol=0, equal_nan=True)
    if not differs.any(axis=None):
        return Parting(None, {}, True, [])
    step = differs.any(axis=1).idxmax()
    values = {key: (float(first[key][step]), float(second[key][step])) for key in common if differs[key][step]}
    same = bool(step != steps[0]) or (keys.REWARD in common and not {keys.REWARD, keys.LENGTH} & {*values})
    return Parting(int(step), values, same, [] if same else changes(second - first, jumps_only=True))


def say_where(one: str, two: str, parting: Parting) -> list[str]:
    """Returns a sentence about two runs, and lines below it."""
    if parting.step is None:
        return [f"{one} and {two} log the same in all steps that both have."]
    if parting.same_samples:
        values = list_first([f"{key} {first:.6g} and {second:.6g}" for key, (first, second) in parting.values.items()])
        return [f"{one} and {two} begin with the same samples and part at step {parting.step}: {values}."]
    differ = f"{one} and {two} differ from their first step on, as runs with other samples do, so no single value says"
    differ += f" where they part. Their difference, {two} minus {one},"
    if not parting.changes:
        return [f"{differ} never jumped and stayed: this can't be told from noise."]
    return [f"{differ} jumped and stayed:", *step_lines(parting.changes)]
