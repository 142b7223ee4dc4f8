"""`clipx diagnose`: what rules and timeline say of a run, for its reader and for programs."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from verl_clipx.base.refusal import did_you_mean
from verl_clipx.diagnose.diagnosis import cover, diagnose
from verl_clipx.diagnose.rule import Kind
from verl_clipx.diagnose.rules import RULES
from verl_clipx.diagnose.timeline import FEWEST, LASTING, SOUGHT, changes, step_lines
from verl_clipx.runs.run import Run

FAILED = 3
"""The exit code if a finding is one of --fail-on."""


def content_of(run: Run) -> dict[str, Any]:
    """Returns all that there is to say of a run, for JSON."""
    rows = [
        {
            "finding": finding.rule.name,
            "kind": finding.rule.kind.value,
            "onset": finding.onset.step,
            "evidence": finding.onset.evidence,
            "heuristic": finding.rule.heuristic,
            "remedy": finding.remedy,
            "link": finding.rule.link,
        }
        for finding in diagnose(run)
    ]
    missing = cover(run)
    return {
        "findings": rows,
        "checked": [name for name, keys in missing.items() if not keys],
        "not_checked": {name: keys for name, keys in missing.items() if keys},
        "changes": [change._asdict() for change in changes(run.log)],
    }


def lines_of(run: Run) -> Iterator[str]:
    """Returns the same in lines with rich's markup: findings, what changed first, how many rules were checked."""
    findings, missing = diagnose(run), cover(run)
    for finding in findings:
        yield f"[bold]{escape(finding.head)}[/] {escape(finding.text)}"
    steps, found = int((run.log.index > 0).sum()), changes(run.log)
    if steps < FEWEST + LASTING:
        yield escape(f"{run.name}: what changed first shows in {FEWEST + LASTING} steps or more; here are {steps}.")
    elif not found:
        yield escape(f"{run.name}: no logged value {SOUGHT}.")
    else:
        yield escape(f"{run.name}: what {SOUGHT} (it may be no fault):")
        yield from map(escape, step_lines(found))
    lacks: dict[str, list[str]] = {}
    for name, keys in missing.items():
        if keys:
            lacks.setdefault(", ".join(dict.fromkeys(_source_of(key, run) for key in keys)), []).append(name)
    checked = sum(not keys for keys in missing.values())
    met = f"checked {checked} of {len(missing)} rules; {len(findings) or 'none'} fired"
    yield escape(f"{run.name}: {met}.{' Not checked, for want of' * bool(lacks)}")
    yield from (escape(f"  {lack}: {'; '.join(names)}") for lack, names in lacks.items())


def _source_of(key: str, run: Run) -> str:
    if key.startswith(("actor/clipx/", "health/")):
        return "this plugin's metrics (+clipx=observe)"
    return key if "/" in key or run.configuration else "the run's configuration"


def fails(run: Run, names: Sequence[str]) -> bool:
    """Returns whether a finding is of a named rule, or of a kind that is named or graver: fact, trend, remark.

    Raises:
        ValueError: a name is of no rule or kind; or there is no such finding, and a named rule could not be checked.
    """
    kinds = [kind.value for kind in Kind]
    known = [*kinds, *(rule.name for rule in RULES)]
    for name in names:
        if name not in known:
            raise ValueError(f"--fail-on {name!r}: must be one of {'; '.join(known)}.{did_you_mean(name, known)}")
    gravest = max((kinds.index(name) for name in names if name in kinds), default=-1)
    if any(one.rule.name in names or kinds.index(one.rule.kind.value) <= gravest for one in diagnose(run)):
        return True
    for name in names:
        if missing := cover(run).get(name):
            raise ValueError(f"--fail-on {name!r} can't be checked: {run.name} lacks {', '.join(missing)}.")
    return False
