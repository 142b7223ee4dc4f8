"""`clipx diagnose`: what rules and timeline say of a run, for its reader and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.diagnose.base_rates import MEASURES, rates
from verl_clipx.diagnose.rules import RULES, Coverage, Diagnosis, Kind, cover, diagnose
from verl_clipx.diagnose.timeline import FEWEST, LASTING, Change, changes, step_lines
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run

FAILED = 3
"""The exit code if a finding is one of --fail-on."""

# What makes a run log a metric, by how the metric's key begins.
LOGGED_BY = {
    "actor/clipx/": "metrics of this plugin (+clipx=observe logs them beside verl's own loss)",
    "health/": "metrics of this plugin (+clipx=observe logs them beside verl's own loss)",
    keys.MISMATCH: "rollout log-probabilities (actor_rollout_ref.rollout.calculate_log_probs=true)",
    "val-core/": "validations (trainer.test_freq)",
}


@dataclass(frozen=True)
class Examination:
    """What there is to say of a run."""

    run: Run
    findings: list[Diagnosis]
    coverage: Coverage
    changes: list[Change]


def examine(path: Path) -> Examination:
    """Reads a run and applies rules and timeline.

    Raises:
        OSError, ValueError: as `read_run`, or the log has no finite number.
    """
    run = read_run(path)
    return Examination(run, diagnose(run), cover(run), changes(run.log))


def content_of(examined: Examination) -> dict[str, Any]:
    """All that it says, for JSON."""
    rows = [
        {
            "finding": one.rule.name,
            "kind": one.rule.kind.value,
            "onset": one.onset.step,
            "evidence": one.onset.evidence,
            "settings": one.settings,
            "heuristic": one.rule.heuristic,
            "remedy": one.remedy,
            "link": one.rule.link,
            "usual": {name: rates().get(name) for name in one.rule.reads if name in MEASURES},
        }
        for one in examined.findings
    ]
    checked, missing = examined.coverage
    changed = [one._asdict() for one in examined.changes]
    return {"findings": rows, "checked": checked, "not_checked": missing, "changes": changed}


def lines_of(examined: Examination) -> Iterator[str]:
    """What it says, in lines with rich's markup."""
    for finding in examined.findings:
        yield f"[bold]{escape(finding.head)}[/] {escape(finding.text)}"
    yield from map(escape, _of_changes(examined))
    checked, missing = examined.coverage
    met = f"{len(examined.findings)} fired" if examined.findings else "none fired"
    yield escape(f"{examined.run.name}: checked {checked} of {checked + len(missing)} rules; {met}.")
    if missing:
        lacks: dict[str, list[str]] = {}
        for name, missed in missing.items():
            lacks.setdefault(_lack(missed, examined.run), []).append(name)
        yield "Not checked, for want of"
        yield from (escape(f"  {lack}: {'; '.join(names)}") for lack, names in lacks.items())


def _of_changes(examined: Examination) -> Iterator[str]:
    name, steps = examined.run.name, int((examined.run.log.index > 0).sum())
    if steps < FEWEST + LASTING:
        yield f"{name}: a log of {FEWEST + LASTING} steps or more shows what changed first; this one has {steps}."
    elif not examined.changes:
        yield f"{name}: no logged value left the range of the steps before it."
    else:
        yield f"{name}: what changed first. Values that left the range of the steps before, which may be no fault:"
        yield from step_lines(examined.changes)


def _lack(missing: Sequence[str], run: Run) -> str:
    """What metrics and keys come from, or else their names."""
    parts = []
    for key in missing:
        source = next((words for begin, words in LOGGED_BY.items() if key.startswith(begin)), key)
        parts.append(source if "/" in key or run.configuration else "the run's configuration")
    return ", ".join(dict.fromkeys(parts))


def unknown_name(names: Sequence[str]) -> str | None:
    """A line that refuses the first name that is neither a rule nor a kind of rules; None if all are."""
    known = [*(kind.value for kind in Kind), *(rule.name for rule in RULES)]
    name = next((name for name in names if name not in known), None)
    return name and f"--fail-on {name!r}: must be one of {'; '.join(known)}.{did_you_mean(name, known)}"


def fails(examined: Examination, names: Sequence[str]) -> bool:
    """Whether a finding is of a rule that is named, or of a kind that is named or graver: fact, trend, remark.

    Raises:
        ValueError: no such finding, and a rule that is named could not be checked.
    """
    kinds = list(Kind)
    gravest = max((kinds.index(kind) for kind in kinds if kind.value in names), default=-1)
    if any(one.rule.name in names or kinds.index(one.rule.kind) <= gravest for one in examined.findings):
        return True
    for name in names:
        if missing := examined.coverage.missing.get(name):
            lacks = f"{examined.run.name} lacks {', '.join(missing)}"
            raise ValueError(f"--fail-on {name!r}: {lacks}, so the rule can't be checked.")
    return False
