"""`clipx diagnose`: what the rules and the timeline say of a run, as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from verl_clipx.analysis.diagnose.diagnosis import diagnose, keys_missing_by_rule
from verl_clipx.analysis.diagnose.rule import Kind
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.diagnose.timeline import FEWEST, LASTING, SOUGHT, find_changes, format_steps
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.pages import folder_of_pages, say_where_pages_are
from verl_clipx.losses.base.refusal import did_you_mean
from verl_clipx.losses.groups import OBSERVE, swap_by

FAILED = 3
"""The exit code if a finding is one of --fail-on."""


def findings_as_json(run: Run) -> dict[str, Any]:
    """Return what diagnose says of a run, for JSON.

    Returns:
        findings: a dictionary for each rule that the run meets, in the order of `diagnose`. `link` is the page that
            says more, as the documentation names it; `page` is its file on this machine.
        checked: the names of the rules that could be checked.
        not_checked: the name of each other rule that concerns the run, with the metrics and keys that the run lacks.
        changes: a dictionary for each change of a logged value, with the fields of `timeline.Change`.
    """
    findings = [
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
    missing_by_rule = keys_missing_by_rule(run)
    return {
        "findings": findings,
        "checked": [name for name, missing in missing_by_rule.items() if not missing],
        "not_checked": {name: missing for name, missing in missing_by_rule.items() if missing},
        "changes": [change._asdict() for change in find_changes(run.log)],
    }


def format_diagnosis(run: Run, *, verbose: bool = False) -> Iterator[str]:
    """Yields what diagnose says of a run as lines with rich's markup, for a reader.

    These are the findings, with a line on where their pages are; the earliest lasting changes of logged values; and how
    many rules were checked.

    Args:
        run: the run.
        verbose: whether to name the rules that could not be checked, with what the run lacks for each. By default they
            are only counted.
    """
    findings = diagnose(run)
    for finding in findings:
        yield f"[bold]{escape(finding.head)}[/] {escape(finding.text)}"
    if findings:
        yield escape(say_where_pages_are())
    yield from map(escape, format_changes(run))
    missing_by_rule = keys_missing_by_rule(run)
    unchecked = {name: missing for name, missing in missing_by_rule.items() if missing}
    checked = len(missing_by_rule) - len(unchecked)
    summary = f"{run.name}: checked {checked} of {len(missing_by_rule)} rules; {len(findings) or 'none'} fired."
    if not unchecked:
        yield escape(summary)
    elif not verbose:
        yield escape(f"{summary} {len(unchecked)} could not be checked: --verbose says what they lack.")
    else:
        yield escape(f"{summary} The others could not be checked. This is what the run lacks, and which rules read it:")
        yield from map(escape, format_lacks(run, unchecked))


def format_changes(run: Run) -> Iterator[str]:
    """Yields the earliest lasting changes of a run's logged values, or a line that says why none is named."""
    steps = int((run.log.index > 0).sum())
    first_changes = find_changes(run.log)
    if steps < FEWEST + LASTING:
        yield f"{run.name}: what changed first can be told from {FEWEST + LASTING} steps on; this log has {steps}."
    elif not first_changes:
        yield f"{run.name}: no logged value {SOUGHT}."
    else:
        yield f"{run.name}: what {SOUGHT} (it may be no fault):"
        yield from format_steps(first_changes)


def format_lacks(run: Run, unchecked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields lines on rules that could not be checked: what the run lacks, then the rules for which it lacks just that.

    Args:
        run: the run.
        unchecked: from the name of a rule to the metrics and keys that the run lacks for it.
    """
    rules_by_lack: dict[str, list[str]] = {}
    for name, missing in unchecked.items():
        sources = dict.fromkeys(_name_source(key, run) for key in missing)
        rules_by_lack.setdefault(", ".join(sources), []).append(name)
    for lack, names in rules_by_lack.items():
        yield f"  {lack}: {'; '.join(names)}"


def _name_source(key: str, run: Run) -> str:
    """Says what a run lacks that would give it a metric or a key.

    Returns:
        For a metric that only the plugin logs, the plugin's metrics. For a key, the configuration if the run left none.
        Otherwise the metric or the key itself.
    """
    if key.startswith(("actor/clipx/", "health/")):
        return f"this plugin's metrics ({swap_by(OBSERVE)})"
    is_metric = "/" in key
    if is_metric or run.configuration:
        return key
    return "the run's configuration"


def fails(run: Run, names: Sequence[str]) -> bool:
    """Return whether a run has a finding on which the user wants the command to fail.

    Args:
        names: of rules and of kinds. A kind stands for itself and for all graver ones.

    Raises:
        ValueError: a name is of no rule or kind; or there is no such finding, and a named rule could not be checked.
    """
    # The gravest kind comes first.
    kinds = [kind.value for kind in Kind]
    known = [*kinds, *(rule.name for rule in RULES)]
    for name in names:
        if name not in known:
            raise ValueError(f"--fail-on {name!r}: must be one of {'; '.join(known)}.{did_you_mean(name, known)}")
    mildest = max((kinds.index(name) for name in names if name in kinds), default=-1)
    for finding in diagnose(run):
        if finding.rule.name in names or kinds.index(finding.rule.kind.value) <= mildest:
            return True
    missing_by_rule = keys_missing_by_rule(run)
    for name in names:
        missing = missing_by_rule.get(name)
        if missing:
            raise ValueError(f"--fail-on {name!r} can't be checked: {run.name} lacks {', '.join(missing)}.")
    return False
