"""What a rule of diagnose is, and how it is declared: `@rule(…)` on the function that finds its onset in a run."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy
import pandas

from verl_clipx.analysis.runs.run import Run

# Steps in a row that a state must last: one bad rollout batch is no pathology.
LASTING = 3


class Onset(NamedTuple):
    """When a pathology begins.

    Args:
        step: the first training step that shows it.
        evidence: what shows it: numbers, each with its metric's name.
    """

    step: int
    evidence: str


Detector = Callable[[Run], Onset | None]


class Kind(Enum):
    """How far a rule can be trusted before a run has ended. The gravest kind comes first, the mildest last."""

    FACT = "fact"
    """No later step can make the finding untrue: it is reported while the run trains, and with `clipx.health=stop` it
    ends the run."""

    TREND = "trend"
    """Reported while the run trains: it was counted how often the beginnings of healthy logs meet the rule."""

    REMARK = "remark"
    """Reported on finished runs only."""


@dataclass(frozen=True)
class Rule:
    """A pathology and how a log shows it.

    Args:
        name: in the field's terms; lower case.
        kind: how far it can be trusted before a run has ended.
        reads: the metrics and keys of the configuration that it reads; a * in a metric's key stands for anything.
        onset: finds the onset in a run; None if the run does not show the pathology or lacks what the rule reads.
        remedy: what to do: a text for all runs, or a function that writes one for a run.
        link: the page of the documentation that says more.
        about: metrics and keys of the configuration. The rule applies only to runs that have one of them; if this is
            empty, to all.
        heuristic: whether the threshold rests on policies of about a million parameters or on judgement.
        any_of: whether it can be checked as soon as a run has one of what it reads.
        instead: metrics and keys by which it can be checked as well, if a run has all of them.
        voids: the names of rules whose advice is void while this one is met, so that this one is named before them.
    """

    name: str
    kind: Kind
    _: KW_ONLY
    reads: tuple[str, ...]
    onset: Detector
    remedy: str | Callable[[Run], str]
    link: str
    about: tuple[str, ...] = ()
    heuristic: bool = False
    any_of: bool = False
    instead: tuple[str, ...] = ()
    voids: tuple[str, ...] = ()


# Every declared rule. Pages list them in this order, and findings of one kind and one onset stand in it.
RULES: list[Rule] = []


def rule(name: str, kind: Kind = Kind.REMARK, **further: Any) -> Callable[[Detector], Detector]:
    """Declare a rule whose onset the decorated function finds.

    Args:
        name, kind: as for `Rule`.
        further: other fields of `Rule`.
    """

    def declare(detector: Detector) -> Detector:
        RULES.append(Rule(name, kind, onset=detector, **further))
        return detector

    return declare


def rule_of_limit(name: str, kind: Kind = Kind.REMARK, *, reads: str, limit: float, **further: Any) -> None:
    """Declare a rule on a metric that stays at or above a limit for as many steps as a state must last.

    Args:
        name, kind: as for `Rule`.
        reads: the key of the metric.
        limit: the least value that meets the rule.
        further: other fields of `Rule`, among them `remedy`.
    """

    @rule(name, kind, reads=(reads,), **further)
    def find_values_beyond(run: Run) -> Onset | None:
        values = training_values(run, reads)
        step = first_lasting_step(values >= limit)
        if step is None:
            return None
        return Onset(step, f"{reads} {values[step]:.3g}, at most {values.max():.3g}")


def training_values(run: Run, key: str) -> pandas.Series:
    """Return a metric's finite values by training step, without those of a validation before the first."""
    values = run.values(key)
    return values[values.index > 0]


def first_lasting_step(state: pandas.Series, steps: int = LASTING) -> int | None:
    """Return the first step of a state that lasts; None if it never lasts.

    Args:
        state: whether a run is in the state, by logged step.
        steps: how many logged steps in a row the state must last.
    """
    last_places = numpy.flatnonzero(state.astype(int).rolling(steps).sum() == steps)
    if not len(last_places):
        return None
    return int(state.index[last_places[0] - steps + 1])


def say_when_halved(values: pandas.Series, best: float, until: int) -> str:
    """Say by which step a metric had fallen below half of its best, and stayed there for three steps.

    Args:
        values: the metric's, by step.
        best: the best value before the fall, which the metric reached at `until` or earlier.
        until: the step at which a rule found the fall. Nothing is said unless the metric was halved before it.

    Returns:
        The end of a sentence, which begins with a comma; empty if nothing is said.
    """
    up_to_fall = values.loc[:until]
    last_step_at_best = up_to_fall[up_to_fall >= best].index[-1]
    step = first_lasting_step(values.loc[last_step_at_best:] < best / 2)
    if step is None or step >= until:
        return ""
    return f", halved by step {step}"
