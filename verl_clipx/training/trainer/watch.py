"""Looks at each step that a run logs: for the worker's receipt, and with the rules of diagnose, which may end it."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_clipx.analysis.diagnose.diagnosis import Diagnosis, diagnose
from verl_clipx.analysis.diagnose.rule import Kind, Rule
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.run_log import Rows, not_finite_in, numbers_in, table_of, with_entropy
from verl_clipx.common.pages import say_where_pages_are
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.shared_metrics import RECEIPT
from verl_clipx.run.record import RunRecord

logger = logging.getLogger(__name__)

FACTS = tuple(rule for rule in RULES if rule.kind is Kind.FACT)
TRENDS = tuple(rule for rule in RULES if rule.kind is Kind.TREND)

# The keys of the metrics that these rules read, under every name that verl has for one.
READ = {key for rule in (*FACTS, *TRENDS) for key in (*rule.reads, *rule.instead)} | {
    keys.ENTROPY_OF_UPDATES,
    keys.NOT_FINITE_RANK,
}


class ReceiptCheck:
    """Looks for the receipt in the logged steps that train the actor: without one, another worker trains it.

    Where tests ran the run's options, the first such step without a receipt stops the run. Elsewhere it is a warning,
    and the second one stops the run: a receipt that never comes says nothing about an engine that no test ran.
    """

    def __init__(self, record: RunRecord):
        asked = record.loss.parameters.get("receipt", "auto")
        # Supervised training has no policy loss, whatever its clipx node says.
        has_policy_loss = record.loss.mode is not None
        self._due = has_policy_loss and record.loss.is_ours and asked != "off"
        stops_at_once = asked == "stop" or (asked == "auto" and not record.untested)
        # How many steps without a receipt stop the run, and how many there were.
        self._most = 1 if stops_at_once else 2
        self._missing = 0
        # Before this step, verl trains only the critic.
        self._first = record.length.critic_warmup or 0

    def look(self, data: dict[str, Any], step: int) -> None:
        """Look at a step's metrics; raise RuntimeError if the receipt is missing and that stops the run."""
        if not self._due or data.get(keys.STEP, -1) < self._first:
            return
        if any(str(key).endswith(RECEIPT.key) for key in data):
            self._due = False
            return
        self._missing += 1
        if self._missing == self._most:
            raise RuntimeError(f"{missing_in(self._missing)} To continue without this check, set {NODE}.receipt=off.")
        logger.warning("clipx: %s The second step without one stops the run.", missing_in(self._missing))


def missing_in(steps: int) -> str:
    """Return the message that so many logged training steps, the first ones, have no receipt."""
    if steps == 1:
        return (
            f"the first logged training step has no {RECEIPT.key}: the plugin's training worker did not make it, so "
            "nothing shows which loss is trained."
        )
    return (
        f"the first {steps} logged training steps have no {RECEIPT.key}: the plugin's training worker did not make "
        "them, so nothing shows which loss is trained."
    )


class Watch:
    """Warns of what the rules find in a run while it trains, once for each rule, or stops the run.

    A fact that was there before the run was resumed does not stop it again.
    """

    def __init__(self, record: RunRecord, before: Rows):
        self._record = record
        self._stops = record.loss.parameters.get("health") == "stop"
        self._rows: Rows = {step: _numbers(data) for step, data in before.items()}
        self._resumed_after = max(before, default=-1)
        # The names of the rules whose findings were logged.
        self._warned_rules: set[str] = set()

    def look(self, data: Mapping[str, Any], step: int) -> str | None:
        """Look at a step's metrics together with those of earlier steps.

        Args:
            data: the metrics, by key. A step may be logged in several parts.
            step: its number.

        Returns:
            The reason to stop the run; None if it goes on.
        """
        self._rows.setdefault(step, {}).update(_numbers(data))
        rows_since_start = {number: row for number, row in self._rows.items() if number > self._resumed_after}
        facts = self._diagnose_anew(rows_since_start, FACTS)
        if facts and self._stops:
            findings = "; ".join(
                f"{fact.rule.name} from step {fact.onset.step} on: {fact.onset.evidence}" for fact in facts
            )
            return f"clipx.health=stop: {findings}. The step is in the log."
        for diagnosis in [*facts, *self._diagnose_anew(self._rows, TRENDS)]:
            logger.warning("clipx.health: %s %s This is said once.", diagnosis.head, diagnosis.text)
            if not self._warned_rules:
                logger.warning("clipx.health: %s", say_where_pages_are())
            self._warned_rules.add(diagnosis.rule.name)
        return None

    def _diagnose_anew(self, rows: Rows, rules: Sequence[Rule]) -> list[Diagnosis]:
        """Return the findings in some steps of those rules whose findings were not logged yet.

        Args:
            rows: the steps' metrics, by step.
            rules: facts or trends.
        """
        run = Run(
            name="this run",
            log=with_entropy(table_of(rows)),
            record=self._record,
            not_finite=not_finite_in(rows),
        )
        new_rules = [rule for rule in rules if rule.name not in self._warned_rules]
        return diagnose(run, new_rules)


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Return what the rules read of a step's metrics: those that they name, and all others that are not finite."""
    metrics = {key: value for key, value in data.items() if value is not None}
    return {key: value for key, value in numbers_in(metrics).items() if key in READ or not math.isfinite(value)}
