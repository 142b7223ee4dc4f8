"""`clipx diagnose`: what rules and timeline say of a run, for its reader and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from verl_clipx.analysis.diagnose.diagnosis import cover, diagnose
from verl_clipx.analysis.diagnose.rule import Kind
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.diagnose.timeline import FEWEST, LASTING, SOUGHT, changes, step_lines
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.pages import folder_of_pages, say_where_pages_are
from verl_clipx.losses.base.refusal import did_you_mean
from verl_clipx.losses.groups import OBSERVE, swap_by

FAILED = 3
"""The exit code if a finding is one of --fail-on."""


def findings_as_json(run: Run) -> dict[str, Any]:
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
            "page": str(folder_of_pages() / finding.rule.link),
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


def lines_of(run: Run, *, verbose: bool = False) -> Iterator[str]:
    """Yields the same in lines with rich's markup: findings, what changed first, how many rules were checked.

    Args:
        verbose: whether to name the rules that could not be checked, with what each lacks, or only to count them.
    """
    findings = diagnose(run)
    for finding in findings:
        yield f"[bold]{escape(finding.head)}[/] {escape(finding.text)}"
    if findings:
        yield escape(say_where_pages_are())
    yield from map(escape, lines_of_changes(run))
    missing = cover(run)
    unchecked = {name: lacking for name, lacking in missing.items() if lacking}
    checked = len(missing) - len(unchecked)
    met = f"{run.name}: checked {checked} of {len(missing)} rules; {len(findings) or 'none'} fired."
    if not unchecked:
        yield escape(met)
    elif not verbose:
        yield escape(f"{met} {len(unchecked)} could not be checked: --verbose says what they lack.")
    else:
        yield escape(f"{met} Not checked, for want of")
        yield from map(escape, lines_of_lacks(run, unchecked))


def lines_of_changes(run: Run) -> Iterator[str]:
    """Yields what changed first in a run."""
    steps = int((run.log.index > 0).sum())
    first_changes = changes(run.log)
    if steps < FEWEST + LASTING:
        yield f"{run.name}: what changed first shows in {FEWEST + LASTING} steps or more; here are {steps}."
    elif not first_changes:
        yield f"{run.name}: no logged value {SOUGHT}."
    else:
        yield f"{run.name}: what {SOUGHT} (it may be no fault):"
        yield from step_lines(first_changes)


def lines_of_lacks(run: Run, unchecked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields a line for each thing that rules lack.

    Args:
        unchecked: the name of a rule to the metrics and keys that it lacks.
    """
    lacks: dict[str, list[str]] = {}
    for name, keys in unchecked.items():
        sources = dict.fromkeys(_source_of(key, run) for key in keys)
        lacks.setdefault(", ".join(sources), []).append(name)
    for lack, names in lacks.items():
        yield f"  {lack}: {'; '.join(names)}"


def _source_of(key: str, run: Run) -> str:
    """Says where a run would have what a rule lacks: by the metric or key itself, or by what has many of them."""
    if key.startswith(("actor/clipx/", "health/")):
        return f"this plugin's metrics ({swap_by(OBSERVE)})"
    is_metric = "/" in key
    if is_metric or run.configuration:
        return key
    return "the run's configuration"


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
    for finding in diagnose(run):
        if finding.rule.name in names or kinds.index(finding.rule.kind.value) <= gravest:
            return True
    for name in names:
        missing = cover(run).get(name)
        if missing:
            raise ValueError(f"--fail-on {name!r} can't be checked: {run.name} lacks {', '.join(missing)}.")
    return False
