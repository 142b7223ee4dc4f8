"""What went wrong in a run and since when: which rules it meets, what to do, and which rules can't be checked."""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import filter as matching
from typing import NamedTuple

import numpy

from verl_clipx.analysis.diagnose.rule import Kind, Onset, Rule
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import MODEL_ROOT


class Diagnosis(NamedTuple):
    """A rule that a run meets, and what to do about it.

    Args:
        run: the run's name.
        rule: the rule.
        onset: from which step on the run meets it, and what shows it.
        remedy: what to do in this run.
    """

    run: str
    rule: Rule
    onset: Onset
    remedy: str

    @property
    def head(self) -> str:
        """The claim, one sentence."""
        return f"{self.run}: {self.rule.name} from step {self.onset.step} on."

    @property
    def text(self) -> str:
        """The evidence, the remedy and the page that says more."""
        return f"{self.onset.evidence}. {self.advice}"

    @property
    def advice(self) -> str:
        """Says what the threshold rests on, the remedy and the page that says more."""
        basis = "The threshold is heuristic. " if self.rule.heuristic else ""
        return f"{basis}{self.remedy} See {self.rule.link}."


def diagnose(run: Run, rules: Sequence[Rule] = RULES) -> list[Diagnosis]:
    """Returns the rules, by default of all, that a run meets, in the order of `in_order`.

    Args:
        run: a whole one, or one that still trains, with its log so far.
    """
    met: list[Diagnosis] = []
    for rule in rules:
        onset = rule.onset(run)
        if onset is not None:
            met.append(Diagnosis(run=run.name, rule=rule, onset=onset, remedy=with_values(run, rule.remedy)))
    return in_order(met)


def in_order(met: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Returns diagnoses in the order in which they are said.

    Facts come before trends, and trends before remarks; those of one kind by onset. One that makes the advice of others
    void comes before these.
    """
    kinds = list(Kind)
    ordered = sorted(met, key=lambda diagnosis: (kinds.index(diagnosis.rule.kind), diagnosis.onset.step))
    for diagnosis in list(ordered):
        place = ordered.index(diagnosis)
        void = [index for index in range(place) if ordered[index].rule.name in diagnosis.rule.voids]
        if void:
            ordered.insert(void[0], ordered.pop(place))
    return ordered


def with_values(run: Run, remedy: str | Callable[[Run], str]) -> str:
    """Returns a remedy in which each key of the configuration has its value in this run behind it, if that is a number.

    Keys below `actor_rollout_ref` may leave that out.
    """

    def with_value(match: re.Match) -> str:
        """Return a key with its value behind it."""
        key = match[0]
        for name in (key, f"{MODEL_ROOT}.{key}"):
            value = run.configuration.get(name)
            if isinstance(value, int | float):
                return f"{key} (here {value})"
        return key

    return re.sub(r"\b[a-z_]+(\.[a-z_0-9]+)+\b", with_value, text_of(remedy, run))


def text_of(remedy: str | Callable[[Run], str], run: Run) -> str:
    """Returns what to do in a run, by a remedy that is the same for all runs or looks at the run."""
    if isinstance(remedy, str):
        return remedy
    return remedy(run)


def keys_missing_for(rule: Rule, run: Run) -> list[str]:
    """Returns what a rule reads and a run does not have; empty if the rule can be judged."""
    missing = _missing_in(run, rule.reads)
    if rule.instead and not _missing_in(run, rule.instead):
        return []
    if rule.any_of and len(missing) < len(rule.reads):
        return []
    return missing


def _missing_in(run: Run, names: Iterable[str]) -> list[str]:
    """Returns those of some metrics and keys that are neither in a run's log nor in its configuration."""
    return [name for name in names if not _is_logged(run, name) and name not in run.configuration]


def _is_logged(run: Run, key: str) -> bool:
    """Returns whether the log has a finite number of a metric; a * in the key stands for anything."""
    columns = [run.log[column].to_numpy(dtype=float) for column in matching(run.log, key)]
    return any(numpy.isfinite(values).any() for values in columns)


def cover(run: Run) -> dict[str, list[str]]:
    """Returns the rules that are about a run, and what each misses in its log and record: nothing if it can be checked.

    Raises:
        ValueError: nothing that the run logged is a finite number and no rule is met: nothing is known of its training.
    """
    if not (_is_logged(run, "*") or diagnose(run)):
        raise ValueError(f"{run.name}: no metric in its log has a finite number, so nothing can be said of the run.")
    return {rule.name: keys_missing_for(rule, run) for rule in RULES if _is_about(rule, run)}


def _is_about(rule: Rule, run: Run) -> bool:
    """Returns whether a rule is about a run, by what the run logs and what its configuration sets."""
    if not rule.about:
        return True
    given = {key for key, value in run.configuration.items() if value is not None}
    return any(_is_logged(run, pattern) or matching(given, f"{pattern}*") for pattern in rule.about)
