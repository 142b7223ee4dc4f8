"""Sentences about the runs, each chosen by a test on their numbers."""

from typing import Any, NamedTuple

import numpy
import pandas

from verl_clipx.analysis.diagnose.diagnosis import Diagnosis, diagnose, order_diagnoses, write_remedy
from verl_clipx.analysis.diagnose.rule import Kind
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
from verl_clipx.common.statistics.estimate import MIN_SEEDS, estimate_share
from verl_clipx.common.statistics.verdict import format_signed, interval_of, judge


class Alarm(NamedTuple):
    """What runs are diagnosed with.

    Args:
        head: the claim, one sentence.
        text: the evidence, the remedy and the page that says more.
        rule: the name of the rule that they meet.
        kind: the kind of that rule; None if the alarm says that no run meets the rule.
    """

    head: str
    text: str
    rule: str
    kind: Kind | None


NO_SEED_COLLAPSED = "No seed collapsed."


Sides = tuple[Comparison, dict[str, Any]]
"""A setting's rewards compared with the baseline's, and the keyword arguments that `judge` takes besides."""


def clipped_share(setting: Setting) -> pandas.Series:
    """Return the share of tokens outside the bounds where PPO clips, by step; empty if a run does not log it."""
    return setting.mean(keys.CLIPPED_LOW).add(setting.mean(keys.CLIPPED_HIGH)).dropna()


def mass_shares(setting: Setting) -> pandas.DataFrame:
    """Return each region's share of the gradient mass, a row for each step; without rows if a run does not log it."""
    mass = pandas.DataFrame({region: setting.mean(key) for region, key in keys.MASS.items()}).dropna()
    total = mass.sum(axis=1)
    return mass[total > 0].div(total[total > 0], axis=0)


def has_searched_bounds(setting: Setting) -> bool:
    """Return whether all runs of a setting log both bounds that BAPO searches, at a common step."""
    return len(setting.mean(keys.BOUND_LOW)) > 0 and len(setting.mean(keys.BOUND_HIGH)) > 0


def compare_rewards(settings: list[Setting], baseline: Setting | None = None) -> list[Finding]:
    """Compare the settings' rewards in training and held out.

    The findings are verdicts if each setting has three seeds, and descriptions if one has fewer.

    Args:
        settings: if there is a single one, the finding says whether its held-out reward rose.
        baseline: the setting with which the others are compared; by default `baseline_of` chooses it.
    """
    if len(settings) == 1:
        change = _compare_with_start(settings[0])
        return [] if change is None else [change]
    baseline = baseline or baseline_of(settings)
    others = [setting for setting in settings if setting is not baseline]
    findings: list[Finding] = []
    for compare_with_baseline in (_compare_training, _compare_held_out):
        compared = [compare_with_baseline(baseline, setting) for setting in others]
        compared = [sides for sides in compared if sides is not None]
        # Every comparison of one kind belongs to the family for which the p-values are corrected.
        corrected = correct_family([comparison for comparison, _ in compared])
        family = sum(comparison.speaks_of_methods for comparison in corrected)
        for comparison, (_, arguments) in zip(corrected, compared, strict=True):
            judgement = judge(comparison, **arguments, family=family)
            # A caveat that several findings share is said once.
            is_said = any(judgement.caveat in finding.text for finding in findings)
            caveat = "" if is_said else judgement.caveat
            findings.append(Finding(judgement.head, f"{judgement.text} {caveat}".strip()))
    return findings


def compare_collapses(settings: list[Setting], baseline: Setting | None = None) -> Finding | None:
    """Say which share of the seeds of each setting collapsed.

    None if a setting has fewer than MIN_SEEDS seeds with rewards, or if there is a single setting and none collapsed.

    Args:
        settings: those whose runs log no reward are left out.
        baseline: see `compare_rewards`.
    """
    first = baseline or baseline_of(settings)
    # The baseline comes first, since the others are compared with it.
    ordered = sorted(settings, key=lambda setting: setting is not first)
    # From a setting's label to what `_find_collapse_of_seeds` returns for it.
    steps_of_settings: dict[str, list[int | None]] = {}
    for setting in ordered:
        steps = _find_collapse_of_seeds(setting)
        if steps:
            steps_of_settings[setting.label] = steps
    collapsed: list[str] = []
    for label, steps in steps_of_settings.items():
        number_of_collapsed = sum(step is not None for step in steps)
        if number_of_collapsed:
            collapsed.append(f"{number_of_collapsed} of {len(steps)} seeds of {label}")
    fewest = min(map(len, steps_of_settings.values()), default=0)
    if fewest < MIN_SEEDS or (not collapsed and len(steps_of_settings) < 2):
        return None
    sentences = [_say_collapsed(label, steps) for label, steps in steps_of_settings.items()]
    base, *others = steps_of_settings
    shares = [_compare_shares_of_collapsed(steps_of_settings[base], steps_of_settings[label]) for label in others]
    for label, comparison in zip(others, correct_family(shares), strict=True):
        if comparison.verdict:
            sentences.append(f"{label} against {base}: {comparison.p_text}")
    doubt = caution(fewest)
    if doubt:
        sentences.append(doubt)
    if collapsed:
        sentences.append(_remedy_of_collapse(settings).rstrip("."))
    head = f"{' and '.join(collapsed)} collapsed." if collapsed else NO_SEED_COLLAPSED
    return Finding(head, f"{'. '.join(sentences)}.")


def _remedy_of_collapse(settings: list[Setting]) -> str:
    """Return what to do in the first run that collapsed."""
    rule = next(rule for rule in RULES if rule.name == REWARD_COLLAPSE)
    run = next(run for setting in settings for run in setting.runs if rule.onset(run))
    return write_remedy(rule, run)


def _find_collapse_of_seeds(setting: Setting) -> list[int | None]:
    """Return, for each seed with rewards, the first step at which a run with this seed had collapsed.

    The step is None for a seed of which no run collapsed.
    """
    first_steps: list[int | None] = []
    for runs in setting.runs_by_seed.values():
        has_rewards = False
        steps: list[int] = []
        for index in runs:
            rewards = setting.runs[index].values(keys.REWARD)
            if rewards.empty:
                continue
            has_rewards = True
            rewards = rewards[rewards.index > 0]
            place = collapse(rewards.to_numpy())
            if place is not None:
                steps.append(int(rewards.index[place]))
        if has_rewards:
            first_steps.append(min(steps, default=None))
    return first_steps


def _compare_shares_of_collapsed(base: list[int | None], other: list[int | None]) -> Comparison:
    """Compare the shares of two settings' seeds that collapsed.

    Args:
        base, other: from `_find_collapse_of_seeds`.
    """
    base_collapsed = [step is not None for step in base]
    other_collapsed = [step is not None for step in other]
    return compare_shares(base_collapsed, other_collapsed)


def _say_collapsed(label: str, steps: list[int | None]) -> str:
    """Say how many seeds of a setting collapsed and from which steps on, with an interval of their share.

    Args:
        label: the setting's label.
        steps: from `_find_collapse_of_seeds`.
    """
    collapsed = [str(step) for step in steps if step is not None]
    estimate = estimate_share(len(collapsed), len(steps))
    interval = f"exact 95\u202f% interval {percent(estimate.low)} to {percent(estimate.high)}"
    if not collapsed:
        return f"{label}: 0 of {len(steps)}, {interval}"
    return f"{label}: {len(collapsed)} of {len(steps)} (from step {', '.join(collapsed)} on), {interval}"


def _compare_training(baseline: Setting, setting: Setting) -> Sides | None:
    """Compare the mean training rewards over the steps that all runs have; None with fewer than two such steps."""
    baseline_rewards = baseline.table(keys.REWARD)
    setting_rewards = setting.table(keys.REWARD)
    common_steps = baseline_rewards.index.intersection(setting_rewards.index)
    training_steps = common_steps[common_steps > 0]
    if len(training_steps) < 2:
        return None
    baseline_rewards = baseline_rewards.loc[training_steps]
    setting_rewards = setting_rewards.loc[training_steps]
    comparison = compare_means(baseline.by_seed(baseline_rewards).mean(), setting.by_seed(setting_rewards).mean())
    basis = f"over {len(training_steps)} steps"
    return _sides(baseline, setting, "training reward", basis, comparison, baseline_rewards, setting_rewards)


def _compare_held_out(baseline: Setting, setting: Setting) -> Sides | None:
    """Compare the rewards of the last validation that all runs have.

    Returns:
        None if all runs have no validation after an update in common, or if the last such validation has not the same
        problems in all runs, or has fewer than two problems.
    """
    runs = [*baseline.runs, *setting.runs]
    steps_of_runs = [{reward.step for reward in run.held_out} for run in runs]
    step = max(set.intersection(*steps_of_runs), default=0)
    if step == 0:
        return None
    # A row for each problem, a column for each run.
    rewards = [next(reward for reward in run.held_out if reward.step == step) for run in runs]
    table = pandas.DataFrame([reward.by_problem for reward in rewards]).T
    if len(table) < 2 or table.isna().any(axis=None):
        return None
    baseline_rewards = table.iloc[:, : len(baseline.runs)]
    setting_rewards = table.iloc[:, len(baseline.runs) :]
    comparison = compare(
        {"held out": baseline.by_seed(baseline_rewards).to_numpy().T},
        {"held out": setting.by_seed(setting_rewards).to_numpy().T},
    )
    basis = f"over {len(table)} problems after step {step}"
    return _sides(baseline, setting, "held-out reward", basis, comparison, baseline_rewards, setting_rewards)


def _sides(
    baseline: Setting,
    setting: Setting,
    measure: str,
    basis: str,
    comparison: Comparison,
    baseline_rewards: pandas.DataFrame,
    setting_rewards: pandas.DataFrame,
) -> Sides:
    """Return a comparison of a setting with the baseline, and what `judge` needs besides it.

    Args:
        baseline, setting: the two settings.
        measure, basis: as for `judge`.
        comparison: the comparison of their rewards.
        baseline_rewards, setting_rewards: these rewards, a column for each run.
    """
    same_shape = baseline_rewards.shape == setting_rewards.shape
    return comparison, {
        "measure": measure,
        "basis": basis,
        "equal": same_shape and bool((baseline_rewards.to_numpy() == setting_rewards.to_numpy()).all()),
        "methods": (baseline.label, setting.label),
        "runs": (_name_runs(baseline), _name_runs(setting)),
    }


def _name_runs(setting: Setting) -> str:
    """Return what a sentence calls the runs of a setting."""
    if len(setting.runs) == 1:
        return setting.name_of(setting.runs[0])
    return f"the {len(setting.runs)} runs of {setting.label}"


def _compare_with_start(setting: Setting) -> Finding | None:
    """Say whether the held-out reward of a run changed from its first validation to its last.

    None if the setting has several runs, or its run fewer than two validations.
    """
    held_out = setting.runs[0].held_out
    if len(setting.runs) > 1 or len(held_out) < 2:
        return None
    before = held_out[0]
    after = held_out[-1]
    text = f"{before.reward} before (step {before.step}), {after.reward} after (step {after.step}): means and "
    text += f"95\u202f% intervals over {len(after.by_problem)} problems"
    head = f"The held-out reward was {number(before.reward.mean)} before and {number(after.reward.mean)} after."
    if set(before.by_problem) != set(after.by_problem) or len(before.by_problem) < 2:
        return Finding(head, f"{text}. To compare them takes two problems or more, the same before and after.")
    problems = list(before.by_problem)
    values_before = numpy.array([[before.by_problem[problem] for problem in problems]])
    values_after = numpy.array([[after.by_problem[problem] for problem in problems]])
    change = compare({"held out": values_before}, {"held out": values_after})
    if change.p_value is None:
        return Finding(head, f"{text}. All problems differ by the same, so nothing says how far chance goes.")
    head = "The held-out reward did not clearly change."
    if change.p_value < LEVEL:
        head = "The held-out reward rose." if change.difference > 0 else "The held-out reward fell."
    return Finding(head, f"{text}. After minus before: {format_signed(change.difference)}, {interval_of(change)}.")


def find_alarms(settings: list[Setting], baseline: Setting | None = None) -> list[Alarm]:
    """Return what the runs are diagnosed with; runs with the same diagnosis share an alarm.

    If there are seeds enough, the alarm of the collapses says which share of the seeds collapsed, with an interval.

    Args:
        settings: the settings whose runs are diagnosed.
        baseline: see `compare_rewards`.

    Returns:
        The alarms in the order of `order_diagnoses`, each at the place of its earliest diagnosis. That no seed
        collapsed is no diagnosis and comes last.
    """
    runs = [(run, setting.name_of(run)) for setting in settings for run in setting.runs]
    by_rule: dict[str, list[Diagnosis]] = {}
    for run, name in runs:
        for diagnosis in diagnose(run):
            by_rule.setdefault(diagnosis.rule.name, []).append(diagnosis._replace(run=name))
    earliest = [min(alike, key=lambda diagnosis: diagnosis.onset.step) for alike in by_rule.values()]
    shares = compare_collapses(settings, baseline)
    alarms: list[Alarm] = []
    for first in order_diagnoses(earliest):
        rule = first.rule
        if rule.name == REWARD_COLLAPSE and shares:
            alarms.append(Alarm(shares.head, shares.text, rule=rule.name, kind=rule.kind))
        else:
            alarms.append(_alarm_of(by_rule[rule.name], len(runs)))
    if shares and shares.head == NO_SEED_COLLAPSED:
        alarms.append(Alarm(shares.head, shares.text, rule=REWARD_COLLAPSE, kind=None))
    return alarms


def _alarm_of(alike: list[Diagnosis], runs: int) -> Alarm:
    """Return one alarm for all runs that meet a rule.

    Args:
        alike: the diagnoses with this rule, one for each of these runs.
        runs: how many runs there are in all.
    """
    first = alike[0]
    rule = first.rule
    if len(alike) == 1:
        return Alarm(first.head, first.text, rule=rule.name, kind=rule.kind)
    evidence = "; ".join(
        f"{diagnosis.run} from step {diagnosis.onset.step} on: {diagnosis.onset.evidence}" for diagnosis in alike
    )
    # Runs may differ in their configurations, and so in what to do. A remedy that they share is said once.
    remedies = dict.fromkeys(diagnosis.remedy for diagnosis in alike)
    advice = first._replace(remedy=" ".join(remedies)).advice
    head = f"{len(alike)} of {runs} runs: {rule.name}."
    return Alarm(head, f"{evidence}. {advice}", rule=rule.name, kind=rule.kind)
