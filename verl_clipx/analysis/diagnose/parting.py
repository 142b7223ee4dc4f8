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


def part(first_run: Run, second_run: Run) -> Parting:
    """Compares two runs step by step, over the metrics that both log, clocks left out.

    Runs have the same samples if they are alike in the first step, or at least in its reward and response length.

    Raises:
        ValueError: they have no training step or no metric in common.
    """
    common = [key for key in first_run.log if key in second_run.log and not is_clock(key)]
    common.sort(key=lambda key: key not in keys.DRAWN)
    steps = [int(step) for step in first_run.log.index.intersection(second_run.log.index) if step > 0]
    if not (common and steps):
        raise ValueError(f"{first_run.name} and {second_run.name}: no training step and metric that both logged.")
    first = first_run.log.loc[steps, common]
    second = second_run.log.loc[steps, common]
    differs = first.copy().astype(bool)
    differs[:] = ~numpy.isclose(first, second, rtol=ROUNDING, atol=0, equal_nan=True)
    if not differs.any(axis=None):
        return Parting(step=None, values={}, same_samples=True, changes=[])
    step = differs.any(axis=1).idxmax()
    values = {}
    for key in common:
        if differs[key][step]:
            values[key] = (float(first[key][step]), float(second[key][step]))
    same_reward_and_length = keys.REWARD in common and not {keys.REWARD, keys.LENGTH} & values.keys()
    same_samples = bool(step != steps[0]) or same_reward_and_length
    changes_of_difference = [] if same_samples else changes(second - first, jumps_only=True)
    return Parting(step=int(step), values=values, same_samples=same_samples, changes=changes_of_difference)


def say_where(first_name: str, second_name: str, parting: Parting) -> list[str]:
    """Returns a sentence about where two runs part, and lines below it; the names are those of `part`'s arguments."""
    if parting.step is None:
        return [f"{first_name} and {second_name} log the same in all steps that both have."]
    if parting.same_samples:
        values = list_first([f"{key} {first:.6g} and {second:.6g}" for key, (first, second) in parting.values.items()])
        return [
            f"{first_name} and {second_name} begin with the same samples and part at step {parting.step}: {values}."
        ]
    differ = (
        f"{first_name} and {second_name} differ from their first step on, as runs with other samples do, so no single "
        f"value says where they part. Their difference, {second_name} minus {first_name},"
    )
    if not parting.changes:
        return [f"{differ} never jumped and stayed: this can't be told from noise."]
    return [f"{differ} jumped and stayed:", *step_lines(parting.changes)]
