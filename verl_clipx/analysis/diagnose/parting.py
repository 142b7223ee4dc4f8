"""Finds the first step at which two runs log different values."""

from typing import NamedTuple

import numpy
import pandas

from verl_clipx.analysis.diagnose.timeline import Change, find_changes, format_steps, is_clock, join_first
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run

# Two values count as equal if they differ by no more than this share of the second one.
ROUNDING = 1e-6


class Parting(NamedTuple):
    """The step at which two runs part, and how they differ from there on.

    Args:
        step: the first training step at which a metric that both runs logged differs; None if there is none.
        values: for each metric that differs at this step, the first and the second run's value.
        same_samples: whether the runs began with the same samples. A later difference is then not due to other samples.
        changes: the lasting jumps in the second run's values minus the first run's; empty if the runs began with the
            same samples.
    """

    step: int | None
    values: dict[str, tuple[float, float]]
    same_samples: bool
    changes: list[Change]


def find_parting(first_run: Run, second_run: Run) -> Parting:
    """Find the first training step at which two runs log different values.

    It compares the metrics that both runs log, except times, throughput and counters. A metric that only one of the
    runs logs at a step, as where the other one does not validate, is no difference.

    The runs are taken to have begun with the same samples if they agree in the first step that both have, or if at
    least the reward and the response length are logged and agree there.

    Raises:
        ValueError: the runs have no training step, or no metric, in common.
    """
    common = [key for key in first_run.log if key in second_run.log and not is_clock(key)]
    # False sorts before True. The metrics that a figure shows come first, since the message names only the first three.
    common.sort(key=lambda key: key not in keys.DRAWN)
    steps = [int(step) for step in first_run.log.index.intersection(second_run.log.index) if step > 0]
    if not (common and steps):
        raise ValueError(
            f"{first_run.name} and {second_run.name} have no logged training step, or no metric, in common."
        )
    first = first_run.log.loc[steps, common]
    second = second_run.log.loc[steps, common]
    both_logged = find_logged(first_run, first) & find_logged(second_run, second)
    is_close = numpy.isclose(first, second, rtol=ROUNDING, atol=0, equal_nan=True)
    differs = both_logged & ~is_close
    if not differs.any(axis=None):
        return Parting(step=None, values={}, same_samples=True, changes=[])
    step = differs.any(axis=1).idxmax()
    values = {}
    for key in common:
        if differs[key][step]:
            values[key] = (float(first[key][step]), float(second[key][step]))
    parts_later = bool(step != steps[0])
    if parts_later or agree_in_samples(both_logged.loc[step], differs.loc[step]):
        return Parting(step=int(step), values=values, same_samples=True, changes=[])
    jumps = find_changes(second - first, jumps_only=True)
    return Parting(step=int(step), values=values, same_samples=False, changes=jumps)


def find_logged(run: Run, log: pandas.DataFrame) -> pandas.DataFrame:
    """Return where a run logged a value, which may be NaN: booleans, a row for each step, a column for each metric.

    Args:
        run: the run.
        log: steps and metrics of its log. NaN stands there for a logged NaN and for a metric that was not logged.
    """
    is_logged = log.notna()
    for key in log:
        logged_as_nan = log.index.isin(run.not_finite.get(key, []))
        is_logged[key] = is_logged[key] | logged_as_nan
    return is_logged


def agree_in_samples(both_logged: pandas.Series, differs: pandas.Series) -> bool:
    """Return whether two runs logged the same reward and the same response length in a step.

    Args:
        both_logged: for each metric, whether both runs logged it in the step.
        differs: for each metric, whether its two values differ.
    """
    agrees = [both_logged.get(key, False) and not differs[key] for key in (keys.REWARD, keys.LENGTH)]
    return all(agrees)


def say_where(first_name: str, second_name: str, parting: Parting) -> list[str]:
    """Return a sentence that says where two runs part, and the lines that stand below it.

    Args:
        first_name, second_name: the names of the runs, in the order in which `find_parting` compared them.
        parting: the result of `find_parting`.
    """
    both_names = f"{first_name} and {second_name}"
    if parting.step is None:
        return [f"{both_names} log the same in all steps that both have."]
    if parting.same_samples:
        values = join_first([f"{key} {first:.6g} and {second:.6g}" for key, (first, second) in parting.values.items()])
        return [f"{both_names} begin with the same samples and part at step {parting.step}: {values}."]
    beginning = (
        f"{both_names} differ from their first step on, as runs with other samples do, so no single value says where "
        f"they part. Their difference, {second_name} minus {first_name},"
    )
    if not parting.changes:
        return [f"{beginning} showed no lasting jump, so it can't be told from noise."]
    return [f"{beginning} jumped and stayed:", *format_steps(parting.changes)]
