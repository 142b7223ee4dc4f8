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
    """The first training step of a state, and what shows it: numbers, each with its metric's name."""

    step: int
    evidence: str


Detector = Callable[[Run], Onset | None]


class Kind(Enum):
    """Says what a rule is good for while a run trains."""

    FACT = "fact"
    """Whatever else is in the log, it stays true: it is said while the run trains, and `clipx.health=stop` ends it."""

    TREND = "trend"
    """It is said while the run trains: how often beginnings of healthy logs meet it was counted."""

    REMARK = "remark"
    """Reported only for finished runs."""


@dataclass(frozen=True)
class Rule:
    """A pathology and how a log shows it.

    Args:
        name: in the field's terms; lower case.
        kind: what it is good for while a run trains.
        reads: the metrics or keys of the record that it reads; a * stands for anything in a metric's key.
        onset: finds the onset in a run; None if the run does not show the pathology or lacks what the rule reads.
        remedy: what to do, the same for all runs or by what a run says; see `diagnosis.with_values`.
        link: the page of the documentation that says more.
        about: metrics or keys of the configuration; the rule is only about runs with one of them, by default all.
        heuristic: whether the threshold rests on policies of about a million parameters or on judgement.
        any_of: whether one of what it reads is enough.
        instead: what serves as well where something that it reads is missing.
        voids: rules whose advice is void while this one is met, so that this one is said before them.
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


# Every rule, in the order in which a page lists them and in which those of one kind and onset are said.
RULES: list[Rule] = []


def rule(name: str, kind: Kind = Kind.REMARK, **further: Any) -> Callable[[Detector], Detector]:
    """Declares a rule whose onset the decorated function finds.

    Args:
        name, kind: as for `Rule`.
        further: other fields of `Rule`. Without `remedy`, the function's docstring is the remedy.
    """

    def declare(detector: Detector) -> Detector:
        remedy = " ".join((detector.__doc__ or "").split())
        RULES.append(Rule(name, kind, onset=detector, **{"remedy": remedy, **further}))
        return detector

    return declare


def rule_of_limit(name: str, kind: Kind = Kind.REMARK, *, reads: str, limit: float, **further: Any) -> None:
    """Declares a rule on one metric that stays at or above a limit."""

    @rule(name, kind, reads=(reads,), **further)
    def find_values_beyond(run: Run) -> Onset | None:
        values = trained(run, reads)
        return onset_at(
            lasts(values >= limit), lambda onset: f"{reads} {values[onset]:.3g}, at most {values.max():.3g}"
        )


def trained(run: Run, key: str) -> pandas.Series:
    """Returns a metric's finite values by training step, without those of a validation before the first."""
    values = run.values(key)
    return values[values.index > 0]


def lasts(state: pandas.Series, steps: int = LASTING) -> int | None:
    """Returns the first step from which a state lasted for so many logged steps."""
    # The places at which it has lasted so long.
    has_lasted = numpy.flatnonzero(state.astype(int).rolling(steps).sum() == steps)
    if not len(has_lasted):
        return None
    return int(state.index[has_lasted[0] - steps + 1])


def halved(values: pandas.Series, best: float, until: int) -> str:
    """Says by which step a value had fallen below half of its best, and stayed there for three steps.

    Args:
        values: those of a metric, by step.
        best: the best of them before.
        until: the step before which it must have fallen; otherwise nothing is said.

    Returns:
        The end of a sentence, which begins with a comma; empty if there is no such step.
    """
    before = values.loc[:until]
    last_best = before[before >= best].index[-1]
    step = lasts(values.loc[last_best:] < best / 2)
    if step is None or step >= until:
        return ""
    return f", halved by step {step}"


def onset_at(step: int | None, say: Callable[[int], str]) -> Onset | None:
    """Returns the onset at a step with what is said of it; None without a step."""
    if step is None:
        return None
    return Onset(int(step), say(step))
