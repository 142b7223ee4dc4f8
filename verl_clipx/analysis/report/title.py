"""What the page says first: the gravest finding, or else what was clipped, or else what is compared."""

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
    """Returns the alarm that a reader must know first.

    It is the first alarm, unless that is a trend and the reward collapsed: the collapse is the gravest trend. Where all
    alarms are remarks, the page begins with what was clipped, if that is known.

    Args:
        alarms: each of a rule that a run meets, in the order of `diagnoses`.
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
    """What is known of a setting's clipping, and so how a sentence says it."""

    BY_VERL = "the share of tokens that verl counts as clipped"
    OUTSIDE = "the share of tokens outside the bounds, some of which have a gradient there"
    CLIPPED = "the share of tokens outside the bounds, where none has a gradient"


def say_what_was_clipped(numbers: Sequence[SettingNumbers]) -> str:
    """Says in a line what each setting's clip did to how many tokens; empty if the log of one does not say."""
    clauses: dict[Clipping, list[str]] = {}
    for of_setting in numbers:
        clipping = _known_clipping(of_setting)
        if clipping is None:
            return ""
        clauses_alike = clauses.setdefault(clipping, [])
        clauses_alike.append(_write_clause(of_setting, clipping, is_first=not clauses_alike))
    # Clauses of one kind stand together, so that the later ones can be short.
    return "; ".join(itertools.chain(*clauses.values()))


def _known_clipping(numbers: SettingNumbers) -> Clipping | None:
    """Returns what is known of a setting's clipping; None if nothing is."""
    if len(numbers.clipped):
        return Clipping.OUTSIDE if numbers.has_gradient_outside else Clipping.CLIPPED
    if len(numbers.clipped_by_verl):
        return Clipping.BY_VERL
    return None


def _write_clause(numbers: SettingNumbers, clipping: Clipping, *, is_first: bool) -> str:
    """Says which share of the tokens a setting clipped.

    Args:
        numbers: the setting's.
        clipping: what is known of its clipping.
        is_first: whether no other setting with the same knowledge is named before. The clauses after it leave out what
            it says, but for OUTSIDE, whose clauses are all in full.
    """
    if clipping is Clipping.BY_VERL:
        share = percent(numbers.clipped_by_verl.mean())
        if is_first:
            return f"verl counted {share} of the tokens of {numbers.label} as clipped"
        return f"{share} of {numbers.label}"
    share = percent(numbers.clipped.mean())
    if clipping is Clipping.OUTSIDE:
        return f"{numbers.label} has {share} outside its bounds, with a gradient"
    if numbers.clipped.max() == 0:
        share = "none"
    if is_first:
        return f"{numbers.label} clipped {share} of the tokens{_describe_most(numbers)}"
    return f"{numbers.label} {share}"


def _describe_most(numbers: SettingNumbers) -> str:
    """Says what most of a setting's clipped tokens are like, by those in its traced update.

    Improbable ones had a probability below a half. Tokens in bad answers have an advantage below 0; they are named only
    where each answer has a single advantage, and where more is clipped at the lower bound than at the upper.

    Returns:
        The end of a clause, which begins with a comma; empty if nothing is traced, if fewer than FEW of the traced
        tokens are clipped, or if most of them have neither in common.
    """
    if numbers.update is None:
        return ""
    tokens = numbers.update.tokens
    clipped = tokens[is_clipped(tokens)]
    if len(clipped) < FEW:
        return ""
    is_improbable = old_probabilities(clipped) < 0.5
    advantages_of_answers = tokens.groupby(["prompt", "sample"]).advantage.nunique()
    answers_have_one_advantage = advantages_of_answers.max() == 1
    mostly_low = numbers.clipped_low.mean() > numbers.clipped_high.mean()
    is_in_bad_answer = (clipped.advantage < 0) & (answers_have_one_advantage and mostly_low)
    if (is_in_bad_answer & is_improbable).mean() > 0.5:
        return ", mostly improbable ones in bad answers"
    if is_improbable.mean() > 0.5:
        return ", mostly improbable ones"
    if is_in_bad_answer.mean() > 0.5:
        return ", mostly in bad answers"
    return ""


def join_labels(labels: Sequence[str]) -> str:
    """Says what is compared: "A", "A against B" or "A, B and C"."""
    if len(labels) < 3:
        return " against ".join(labels)
    return f"{', '.join(labels[:-1])} and {labels[-1]}"


def name_comparison(labels: Sequence[str]) -> str:
    """Returns the title of a page whose logs say nothing that could be the title."""
    if len(labels) == 1:
        return f"{labels[0]}: what the log says"
    return f"{join_labels(labels)}: what the logs say"
