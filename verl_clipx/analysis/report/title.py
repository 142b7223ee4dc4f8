"""The title of the page: the gravest finding or, without one, what was clipped or what is compared."""

import itertools
from collections.abc import Sequence
from enum import Enum

from verl_clipx.analysis.diagnose.findings import Alarm
from verl_clipx.analysis.diagnose.rule import Kind
from verl_clipx.analysis.diagnose.rules import REWARD_COLLAPSE
from verl_clipx.analysis.report.numbers import SettingNumbers
from verl_clipx.analysis.report.tokens import FEW, is_clipped, old_probabilities
from verl_clipx.common.sentences import percent


def choose_gravest(alarms: Sequence[Alarm], *, clipping_is_known: bool) -> Alarm | None:
    """Return the alarm that a reader must know first.

    It is the first one, as `find_alarms` orders them. But if that is a trend, a collapse of the reward goes before it,
    since it is the gravest of all trends. If all alarms are remarks and it is known what was clipped, the page begins
    with what was clipped.

    Args:
        alarms: an alarm for each rule that a run meets, as `find_alarms` orders them: facts, trends, remarks.
        clipping_is_known: whether each log says how many tokens were clipped at which bound.

    Returns:
        The alarm; None if there is none, or if the page begins with what was clipped.
    """
    if not alarms:
        return None
    if clipping_is_known and all(alarm.kind is Kind.REMARK for alarm in alarms):
        return None
    if alarms[0].kind is Kind.TREND:
        for alarm in alarms:
            if alarm.rule == REWARD_COLLAPSE:
                return alarm
    return alarms[0]


class Clipping(Enum):
    """What is known of a setting's clipping. The clauses of the title differ by it."""

    COUNTED_BY_VERL = "the share of tokens that verl counts as clipped"
    OUTSIDE_WITH_GRADIENT = "the share of tokens outside the bounds, some of which have a gradient there"
    # Where the gradient's mass was not logged, such tokens are taken to have no gradient.
    OUTSIDE_WITHOUT_GRADIENT = "the share of tokens outside the bounds, none of which is known to have a gradient"


def say_what_was_clipped(numbers: Sequence[SettingNumbers]) -> str:
    """Say in one line which share of the tokens each setting clipped.

    The line is empty if it is not known of each setting which share it clipped.
    """
    clauses: dict[Clipping, list[str]] = {}
    for numbers_of_setting in numbers:
        clipping = _classify_clipping(numbers_of_setting)
        if clipping is None:
            return ""
        clauses_of_kind = clauses.setdefault(clipping, [])
        clauses_of_kind.append(_write_clause(numbers_of_setting, clipping, is_first=not clauses_of_kind))
    # Clauses of one kind follow each other, so that the later ones can be short.
    return "; ".join(itertools.chain(*clauses.values()))


def _classify_clipping(numbers_of_setting: SettingNumbers) -> Clipping | None:
    """Return what is known of a setting's clipping; None if nothing is."""
    if len(numbers_of_setting.clipped):
        if numbers_of_setting.has_gradient_outside:
            return Clipping.OUTSIDE_WITH_GRADIENT
        return Clipping.OUTSIDE_WITHOUT_GRADIENT
    if len(numbers_of_setting.clipped_by_verl):
        return Clipping.COUNTED_BY_VERL
    return None


def _write_clause(numbers_of_setting: SettingNumbers, clipping: Clipping, *, is_first: bool) -> str:
    """Say which share of the tokens a setting clipped.

    Args:
        numbers_of_setting: the setting's numbers.
        clipping: what is known of its clipping.
        is_first: whether this is the first clause of its kind. Later clauses of the kind are shorter, except those of
            OUTSIDE_WITH_GRADIENT.
    """
    label = numbers_of_setting.label
    if clipping is Clipping.COUNTED_BY_VERL:
        share = percent(numbers_of_setting.clipped_by_verl.mean())
        if is_first:
            return f"verl counted {share} of the tokens of {label} as clipped"
        return f"{share} of {label}"
    share = percent(numbers_of_setting.clipped.mean())
    if clipping is Clipping.OUTSIDE_WITH_GRADIENT:
        return f"{label} has {share} outside its bounds, with a gradient"
    if numbers_of_setting.clipped.max() == 0:
        share = "none"
    if is_first:
        return f"{label} clipped {share} of the tokens{_describe_most(numbers_of_setting)}"
    return f"{label} {share}"


def _describe_most(numbers_of_setting: SettingNumbers) -> str:
    """Say what most of a setting's clipped tokens have in common, by those in its traced update.

    A token is improbable if its old probability is below a half. It is in a bad answer if its advantage is below 0. Bad
    answers are mentioned only if all tokens of an answer have the same advantage, and if more tokens are clipped at the
    lower bound than at the upper.

    Returns:
        The end of a clause, which begins with a comma. It is empty if nothing is traced, if fewer than FEW of the
        traced tokens are clipped, or if neither is true of most of them.
    """
    if numbers_of_setting.update is None:
        return ""
    tokens = numbers_of_setting.update.tokens
    clipped = tokens[is_clipped(tokens)]
    if len(clipped) < FEW:
        return ""
    is_improbable = old_probabilities(clipped) < 0.5
    advantages_of_answers = tokens.groupby(["prompt", "sample"]).advantage.nunique()
    answers_have_one_advantage = advantages_of_answers.max() == 1
    mostly_low = numbers_of_setting.clipped_low.mean() > numbers_of_setting.clipped_high.mean()
    is_in_bad_answer = (clipped.advantage < 0) & (answers_have_one_advantage and mostly_low)
    if (is_in_bad_answer & is_improbable).mean() > 0.5:
        return ", mostly improbable ones in bad answers"
    if is_improbable.mean() > 0.5:
        return ", mostly improbable ones"
    if is_in_bad_answer.mean() > 0.5:
        return ", mostly in bad answers"
    return ""


def join_labels(labels: Sequence[str]) -> str:
    """Return the labels in one text: "A", "A against B" or "A, B and C"."""
    if len(labels) < 3:
        return " against ".join(labels)
    return f"{', '.join(labels[:-1])} and {labels[-1]}"


def name_comparison(labels: Sequence[str]) -> str:
    """Return the title of a page whose logs say nothing that could be the title."""
    if len(labels) == 1:
        return f"{labels[0]}: what the log says"
    return f"{join_labels(labels)}: what the logs say"
