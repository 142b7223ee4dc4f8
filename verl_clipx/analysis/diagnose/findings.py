"""Sentences about the runs, each chosen by a test on their numbers."""

from typing import Any

import numpy
import pandas

from verl_clipx.analysis.diagnose.diagnosis import Diagnosis, diagnose, in_order, text_of
from verl_clipx.analysis.diagnose.rules import REWARD_COLLAPSE, RULES
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import Setting, baseline_of
from verl_clipx.common.sentences import Finding, number, percent
from verl_clipx.common.statistics.collapse import caution, collapse
from verl_clipx.common.statistics.comparison import (
    LEVEL,
    Comparison,
    compare,
    compare_means,
    compare_shares,
    correct_family,
)
from verl_clipx.common.statistics.estimate import MIN_SEEDS, share
from verl_clipx.common.statistics.verdict import format_signed, interval_of, judge

Sides = tuple[Comparison, dict[str, Any]]
"""A setting's rewards against the baseline's, and what else `judge` takes."""


def clipped_share(setting: Setting) -> pandas.Series:
    """Returns the share of tokens outside the bounds where PPO clips, by step; empty if no run logs it."""
    return setting.mean(keys.CLIPPED_LOW).add(setting.mean(keys.CLIPPED_HIGH)).dropna()


def mass_shares(setting: Setting) -> pandas.DataFrame:
    """Returns each region's share of the gradient mass, a row a step; without rows if no run logs it."""
    mass = pandas.DataFrame({region: setting.mean(key) for region, key in keys.MASS.items()}).dropna()
    total = mass.sum(axis=1)
    return mass[total > 0].div(total[total > 0], axis=0)


def has_searched_bounds(setting: Setting) -> bool:
    """Returns whether all its runs log BAPO's two bounds, at a common step."""
    return len(setting.mean(keys.BOUND_LOW)) > 0 and len(setting.mean(keys.BOUND_HIGH)) > 0


def rewards(settings: list[Setting], baseline: Setting | None = None) -> list[Finding]:
    """Compares rewards in training and held out: with three seeds of each setting by a verdict, else by a description.

    Args:
        settings: for a single one, the finding says whether its held-out reward rose.
        baseline: what the others are compared with; by default `baseline_of` chooses it.
    """
    if len(settings) == 1:
        return [finding for finding in [_rise(settings[0])] if finding]
    baseline = baseline or baseline_of(settings)
    pairs = [(baseline, setting) for setting in settings if setting is not baseline]
    findings: list[Finding] = []
    for compare_pair in (_compare_training, _compare_held_out):
        compared = [sides for pair in pairs if (sides := compare_pair(*pair))]
        judged = correct_family([comparison for comparison, _ in compared])
        family = sum(comparison.is_of_methods for comparison in judged)
        for comparison, (_, named) in zip(judged, compared, strict=True):
            judgement = judge(comparison, **named, family=family)
            caveat = "" if any(judgement.caveat in finding.text for finding in findings) else judgement.caveat
            findings.append(Finding(judgement.head, f"{judgement.text} {caveat}".strip()))
    return findings


def collapses(settings: list[Setting], baseline: Setting | None = None) -> Finding | None:
    """Returns the share of seeds of each setting that collapsed; None with too few seeds, or one setting without any.

    Args:
        settings: those whose runs log no reward are left out.
        baseline: see `rewards`.
    """
    first = baseline or baseline_of(settings)
    ordered = sorted(settings, key=lambda setting: setting is not first)
    fell = {setting.label: steps for setting in ordered if (steps := _collapses(setting))}
    some = [f"{sum(map(bool, steps))} of {len(steps)} seeds of {label}" for label, steps in fell.items() if any(steps)]
    fewest = min(map(len, fell.values()), default=0)
    if fewest < MIN_SEEDS or (not some and len(fell) < 2):
        return None
    base, *others = fell
    judged = correct_family([compare_shares(fell[base], fell[label]) for label in others])
    texts = [_collapsed(label, steps) for label, steps in fell.items()]
    texts += [f"{label} against {base}: {one.p_text}" for label, one in zip(others, judged, strict=True) if one.verdict]
    texts += filter(None, [caution(fewest), _remedy_of_collapse(settings).rstrip(".") if some else ""])
    return Finding(f"{' and '.join(some) or 'No seed'} collapsed.", f"{'. '.join(texts)}.")


def _remedy_of_collapse(settings: list[Setting]) -> str:
    """Returns what to do in the first run that collapsed."""
    rule = next(rule for rule in RULES if rule.name == REWARD_COLLAPSE)
    run = next(run for setting in settings for run in setting.runs if rule.onset(run))
    return text_of(rule.remedy, run)


def _collapses(setting: Setting) -> list[int | None]:
    """Returns for each seed with rewards the first step at which a run of it had collapsed, None where none did."""
    first_steps = []
    for runs in setting.runs_by_seed.values():
        rewards = [values[values.index > 0] for index in runs if len(values := setting.runs[index].values(keys.REWARD))]
        fell = [int(one.index[at]) for one in rewards if (at := collapse(one.to_numpy())) is not None]
        first_steps += [min(fell, default=None)] if rewards else []
    return first_steps


def _collapsed(label: str, steps: list[int | None]) -> str:
    """Says how many collapsed and where, with an interval."""
    at = [str(step) for step in steps if step]
    of_all, where = share(len(at), len(steps)), f" (from step {', '.join(at)} on)" if at else ""
    interval = f"exact 95\u202f% interval {percent(of_all.low)} to {percent(of_all.high)}"
    return f"{label}: {len(at)} of {len(steps)}{where}, {interval}"


def _compare_training(one: Setting, two: Setting) -> Sides | None:
    """Returns the mean training rewards over the steps that all runs have; None with fewer than two such steps."""
    first, second = one.table(keys.REWARD), two.table(keys.REWARD)
    steps = first.index.intersection(second.index)
    steps = steps[steps > 0]
    if len(steps) < 2:
        return None
    first, second = first.loc[steps], second.loc[steps]
    comparison = compare_means(*(setting.by_seed(table).mean() for setting, table in ((one, first), (two, second))))
    return _sides(one, two, "training reward", f"over {len(steps)} steps", comparison, first, second)


def _compare_held_out(one: Setting, two: Setting) -> Sides | None:
    """Returns the rewards of the last validation that all runs have; None before any update or with other problems."""
    runs = [run for setting in (one, two) for run in setting.runs]
    step = max(set.intersection(*({reward.step for reward in run.held_out} for run in runs)), default=0)
    if step == 0:
        return None
    # A row a problem, a column a run.
    rewards = [next(reward for reward in run.held_out if reward.step == step) for run in runs]
    table = pandas.DataFrame([reward.by_problem for reward in rewards]).T
    if len(table) < 2 or table.isna().any(axis=None):
        return None
    first, second = table.iloc[:, : len(one.runs)], table.iloc[:, len(one.runs) :]
    values = [{"held out": setting.by_seed(part).to_numpy().T} for setting, part in ((one, first), (two, second))]
    basis = f"over {len(table)} problems after step {step}"
    return _sides(one, two, "held-out reward", basis, compare(*values), first, second)


def _sides(one: Setting, two: Setting, measure: str, basis: str, comparison: Comparison, first, second) -> Sides:
    equal = first.shape == second.shape and bool((first.to_numpy() == second.to_numpy()).all())
    runs = [
        setting.name_of(setting.runs[0])
        if len(setting.runs) == 1
        else f"the {len(setting.runs)} runs of {setting.label}"
        for setting in (one, two)
    ]
    names = {"methods": (one.label, two.label), "runs": (runs[0], runs[1])}
    return comparison, {"measure": measure, "basis": basis, "equal": equal, **names}


def _rise(setting: Setting) -> Finding | None:
    """Says whether the held-out reward of a run changed from its first validation to its last."""
    held_out = setting.runs[0].held_out
    if len(setting.runs) > 1 or len(held_out) < 2:
        return None
    before, after = held_out[0], held_out[-1]
    text = f"{before.reward} before (step {before.step}), {after.reward} after (step {after.step}): means and "
    text += f"95\u202f% intervals over {len(after.by_problem)} problems"
    head = f"The held-out reward was {number(before.reward.mean)} before and {number(after.reward.mean)} after."
    if set(before.by_problem) != set(after.by_problem) or len(before.by_problem) < 2:
        return Finding(head, f"{text}. To compare them takes two problems or more, the same before and after.")
    values = [numpy.array([[reward.by_problem[name] for name in before.by_problem]]) for reward in (before, after)]
    change = compare(*({"held out": value} for value in values))
    if change.p_value is None:
        return Finding(head, f"{text}. All problems differ by the same, so nothing says how far chance goes.")
    head = "The held-out reward did not clearly change."
    if change.p_value < LEVEL:
        head = f"The held-out reward {'rose' if change.difference > 0 else 'fell'}."
    return Finding(head, f"{text}. After minus before: {format_signed(change.difference)}, {interval_of(change)}.")


def diagnoses(settings: list[Setting], baseline: Setting | None = None) -> list[Finding]:
    """Returns what the runs are diagnosed with; runs with the same diagnosis share a finding.

    Where there are seeds enough, that some collapsed is said by their share, with an interval.
    """
    runs = [(run, setting.name_of(run)) for setting in settings for run in setting.runs]
    by_rule: dict[str, list[Diagnosis]] = {}
    for run, name in runs:
        for diagnosis in diagnose(run):
            by_rule.setdefault(diagnosis.rule.name, []).append(diagnosis._replace(run=name))
    if shares := collapses(settings, baseline):
        by_rule.pop(REWARD_COLLAPSE, None)
    earliest = [min(alike, key=lambda diagnosis: diagnosis.onset.step) for alike in by_rule.values()]
    said = [_say_of_all(by_rule[first.rule.name], len(runs)) for first in in_order(earliest)]
    return [*said, *([shares] if shares else [])]


def _say_of_all(alike: list[Diagnosis], runs: int) -> Finding:
    """Returns one finding for the runs, of so many, that meet one rule."""
    first = alike[0]
    if len(alike) == 1:
        return Finding(first.head, first.text)
    each = "; ".join(f"{one.run} from step {one.onset.step} on: {one.onset.evidence}" for one in alike)
    advice = first._replace(remedy=" ".join(dict.fromkeys(one.remedy for one in alike))).advice
    return Finding(f"{len(alike)} of {runs} runs: {first.rule.name}.", f"{each}. {advice}")
