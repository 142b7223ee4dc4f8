"""What went wrong in a run and since when: which rules it meets, what to do, and which rules can't be checked."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy

from verl_clipx.analysis.diagnose.rule import Kind, Onset, Rule
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import MODEL_ROOT

# A key of a configuration, within a text.
DOTTED_KEY = re.compile(r"\b[a-z_]+(\.[a-z_0-9]+)+\b")


class Diagnosis(NamedTuple):
    """A rule that a run meets, and what to do about it.

    Args:
        run: the run's name.
        rule: the rule.
        onset: the step from which on the run meets the rule, and what shows it.
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
        """The evidence, followed by the advice."""
        return f"{self.onset.evidence}. {self.advice}"

    @property
    def advice(self) -> str:
        """The remedy and the page that says more, after a caution where the rule's threshold is heuristic."""
        basis = "The threshold is heuristic. " if self.rule.heuristic else ""
        return f"{basis}{self.remedy} See {self.rule.link}."


def diagnose(run: Run, rules: Sequence[Rule] = RULES) -> list[Diagnosis]:
    """Return a diagnosis for each rule that a run meets, in the order of `order_diagnoses`.

    Args:
        run: a run that has ended, or one that still trains, with its log so far.
        rules: those to look for; by default all.
    """
    diagnoses: list[Diagnosis] = []
    for rule in rules:
        onset = rule.onset(run)
        if onset is not None:
            remedy = add_values_to_keys(write_remedy(rule, run), run)
            diagnoses.append(Diagnosis(run=run.name, rule=rule, onset=onset, remedy=remedy))
    return order_diagnoses(diagnoses)


def order_diagnoses(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return diagnoses in the order in which a reader should see them.

    Facts come before trends, and trends before remarks. Diagnoses of one kind are ordered by their onset. But a
    diagnosis that makes the advice of others void comes right before the first of these.
    """
    kinds = list(Kind)
    by_kind_and_step = sorted(diagnoses, key=lambda diagnosis: (kinds.index(diagnosis.rule.kind), diagnosis.onset.step))
    ordered: list[Diagnosis] = []
    for diagnosis in by_kind_and_step:
        voided_places = [place for place, earlier in enumerate(ordered) if earlier.rule.name in diagnosis.rule.voids]
        ordered.insert(min(voided_places, default=len(ordered)), diagnosis)
    return ordered


def write_remedy(rule: Rule, run: Run) -> str:
    """Return what a rule advises in a run; some rules advise the same in all runs."""
    if isinstance(rule.remedy, str):
        return rule.remedy
    return rule.remedy(run)


def add_values_to_keys(text: str, run: Run) -> str:
    """Return a text in which the run's own value follows each key of the configuration, as in `rollout.n (here 8)`.

    A key without a value in the run's configuration, or with one that is neither a number nor true or false, stays
    alone. A key in the text may leave out `actor_rollout_ref` at its beginning.
    """

    def add_value(match: re.Match) -> str:
        key = match[0]
        for full_key in (key, f"{MODEL_ROOT}.{key}"):
            value = run.record.kept(full_key)
            # In Python true and false are whole numbers too.
            if isinstance(value, int | float):
                return f"{key} (here {value})"
        return key

    return DOTTED_KEY.sub(add_value, text)


def keys_missing_for(rule: Rule, run: Run) -> list[str]:
    """Return the metrics and keys that a run lacks for a rule; none if the rule can be checked."""
    missing = missing_in(run, rule.reads)
    has_substitute = bool(rule.instead) and not missing_in(run, rule.instead)
    if has_substitute:
        return []
    has_some = len(missing) < len(rule.reads)
    if rule.any_of and has_some:
        return []
    return missing


def missing_in(run: Run, names: Iterable[str]) -> list[str]:
    """Return those metrics and keys that are neither in a run's log nor in its configuration."""
    return [name for name in names if not _is_logged(run, name) and name not in run.configuration]


def _is_logged(run: Run, pattern: str) -> bool:
    """Return whether the log has a finite number of a metric.

    Args:
        pattern: the metric's key; a * in it stands for any characters, so that it may match several metrics.
    """
    columns = [run.log[key].to_numpy(dtype=float) for key in fnmatch.filter(run.log, pattern)]
    return any(numpy.isfinite(values).any() for values in columns)


def keys_missing_by_rule(run: Run) -> dict[str, list[str]]:
    """Return, by the name of each rule that applies to a run, the metrics and keys that the run lacks for it.

    A rule for which nothing is missing can be checked.

    Raises:
        ValueError: nothing that the run logged is a finite number and no rule is met: nothing is known of its training.
    """
    if not (_is_logged(run, "*") or diagnose(run)):
        raise ValueError(f"{run.name}: no metric in its log has a finite number, so nothing can be said of the run.")
    return {rule.name: keys_missing_for(rule, run) for rule in RULES if _applies_to(rule, run)}


def _applies_to(rule: Rule, run: Run) -> bool:
    """Return whether a rule applies to a run: it is about all runs, or about an option that the run uses.

    A run uses an option if it logs one of the metrics in `rule.about`, or if its configuration sets one of the keys in
    it, or a key below such a one, to anything but null.
    """
    if not rule.about:
        return True
    set_keys = [key for key, value in run.configuration.items() if value is not None]
    for name in rule.about:
        is_set = bool(fnmatch.filter(set_keys, f"{name}*"))
        if is_set or _is_logged(run, name):
            return True
    return False
