"""What the page says first: the gravest finding, or else what was clipped, or else what is compared."""

import itertools
from collections.abc import Sequence

from verl_clipx.analysis.diagnose.findings import Alarm
from verl_clipx.analysis.diagnose.rule import Kind
from verl_clipx.analysis.diagnose.rules import REWARD_COLLAPSE
from verl_clipx.analysis.report.numbers import SettingNumbers
from verl_clipx.analysis.report.tokens import FEW, is_clipped, old_probabilities
from verl_clipx.common.sentences import percent


def choose_gravest(alarms: Sequence[Alarm], *, clipping_is_known: bool) -> Alarm | None:
    """Returns the alarm that a reader must know first; None without any.

    It is the first in their order, unless that is a trend: then it is the collapse of the reward, if it collapsed.
    Remarks alone are less than what was clipped, where that is known.

    Args:
        alarms: each of a rule that a run meets, in the order of `diagnoses`.
        clipping_is_known: whether each log says how many tokens were clipped at which bound.
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


BY_VERL = "counted by verl"
OUTSIDE = "outside"
CLIPPED = "clipped"


def say_what_was_clipped(numbers: Sequence[SettingNumbers]) -> str:
    """Says in a line what each setting's clip did to how many tokens; empty if the log of one does not say."""
    clauses: dict[str, list[str]] = {}
    for setting in numbers:
        kind = _kind_of_clipping(setting)
        if kind is None:
            return ""
        is_first = kind not in clauses
        clauses.setdefault(kind, []).append(_clause(setting, kind, is_first=is_first))
    # Clauses of one kind stand together.
    return "; ".join(itertools.chain(*clauses.values()))


def _kind_of_clipping(numbers: SettingNumbers) -> str | None:
    """Returns what is known of a setting's clipping, one of BY_VERL, OUTSIDE and CLIPPED; None if nothing."""
    if len(numbers.clipped):
        return OUTSIDE if numbers.has_gradient_outside else CLIPPED
    return BY_VERL if len(numbers.clipped_by_verl) else None


def _clause(numbers: SettingNumbers, kind: str, *, is_first: bool) -> str:
    """Says how many tokens a setting clipped: in full, or in short after another one of the same kind."""
    if kind == BY_VERL:
        share = percent(numbers.clipped_by_verl.mean())
        if is_first:
            return f"verl counted {share} of the tokens of {numbers.label} as clipped"
        return f"{share} of {numbers.label}"
    if kind == OUTSIDE:
        return f"{numbers.label} has {percent(numbers.clipped.mean())} outside its bounds, with a gradient"
    share = percent(numbers.clipped.mean()) if numbers.clipped.max() > 0 else "none"
    if is_first:
        return f"{numbers.label} clipped {share} of the tokens{_mostly(numbers)}"
    return f"{numbers.label} {share}"


def _mostly(numbers: SettingNumbers) -> str:
    """Says of which kind most clipped tokens are, by the traced ones; empty where that isn't known."""
    if numbers.update is None:
        return ""
    tokens = numbers.update.tokens
    clipped = tokens[is_clipped(tokens)]
    if len(clipped) < FEW:
        return ""
    advantages_of_answers = tokens.groupby(["prompt", "sample"]).advantage.nunique()
    answers_have_one_advantage = advantages_of_answers.max() == 1
    mostly_low = numbers.clipped_low.mean() > numbers.clipped_high.mean()
    in_bad_answers = (clipped.advantage < 0) & (answers_have_one_advantage and mostly_low)
    improbable = old_probabilities(clipped) < 0.5
    if (in_bad_answers & improbable).mean() > 0.5:
        return ", mostly improbable ones in bad answers"
    if improbable.mean() > 0.5:
        return ", mostly improbable ones"
    if in_bad_answers.mean() > 0.5:
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
