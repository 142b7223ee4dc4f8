"""The rules of diagnose, on a run's log so far: they warn, and a fact may end the run."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl_clipx.diagnose.diagnosis import Diagnosis, diagnose
from verl_clipx.diagnose.rule import Kind, Rule
from verl_clipx.diagnose.rules import RULES
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run
from verl_clipx.runs.run_log import Rows, not_finite_in, table_of, with_entropy
from verl_clipx.runs.sameness import flat

logger = logging.getLogger(__name__)

FACTS = tuple(rule for rule in RULES if rule.kind is Kind.FACT)
TRENDS = tuple(rule for rule in RULES if rule.kind is Kind.TREND)
# What these rules read, under every name that verl has for it.
READ = {key for rule in (*FACTS, *TRENDS) for key in (*rule.reads, *rule.instead)} | {
    keys.ENTROPY_OF_UPDATES,
    keys.NOT_FINITE_RANK,
}


class Watch:
    """Says what the rules find in a run while it trains, each finding once, or stops the run.

    A fact in what the run had logged before it was resumed doesn't stop it again.
    """

    def __init__(self, config: dict[str, Any], before: Rows, *, stops: bool):
        self._configuration = flat(config)
        self._stops = stops
        self._rows: Rows = {step: _numbers(data) for step, data in before.items()}
        self._resumed_after = max(before, default=-1)
        self._said: set[str] = set()

    def look(self, data: Mapping[str, Any], step: int) -> str | None:
        """Looks at a step's metrics with earlier ones; returns why a new fact stops the run."""
        self._rows.setdefault(step, {}).update(_numbers(data))
        new = {at: row for at, row in self._rows.items() if at > self._resumed_after}
        facts = self._find(new, FACTS)
        if facts and self._stops:
            said = "; ".join(f"{one.rule.name} from step {one.onset.step} on: {one.onset.evidence}" for one in facts)
            return f"clipx.health=stop: {said}. The step is in the log."
        for diagnosis in [*facts, *self._find(self._rows, TRENDS)]:
            logger.warning("clipx.health: %s %s This is said once.", diagnosis.head, diagnosis.text)
            self._said.add(diagnosis.rule.name)
        return None

    def _find(self, rows: Rows, rules: Sequence[Rule]) -> list[Diagnosis]:
        run = Run("this run", with_entropy(table_of(rows)), self._configuration, not_finite=not_finite_in(rows))
        return diagnose(run, [rule for rule in rules if rule.name not in self._said])


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in data.items() if key in READ and value is not None}
