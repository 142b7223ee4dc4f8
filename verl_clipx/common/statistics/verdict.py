"""The verdict of a comparison of two methods or runs, and the sentences that say it."""

from typing import NamedTuple

from verl_clipx.common.sentences import number
from verl_clipx.common.statistics.comparison import ALIKE, QUESTIONS, SEEDS, Comparison, describe_too_few_seeds
from verl_clipx.common.statistics.estimate import MIN_SEEDS


class Judgement(NamedTuple):
    """What a comparison says.

    Args:
        verdict: `HIGHER`, `LOWER` or `ALIKE`, of the second against the first; None if it says nothing of methods.
        head: the claim, one sentence.
        text: the numbers that it rests on.
        caveat: a sentence that says why there is no verdict; empty if there is one.
    """

    verdict: str | None
    head: str
    text: str
    caveat: str = ""


def judge(
    comparison: Comparison,
    measure: str,
    basis: str,
    methods: tuple[str, str],
    runs: tuple[str, str],
    *,
    family: int = 1,
    equal: bool = False,
) -> Judgement:
    """Return the verdict on the second of two methods against the first, and its sentence.

    Args:
        comparison: from `compare` or `compare_means`. If it is one of several, its p-value is adjusted by Holm's
            method.
        measure: what was compared, such as "training reward".
        basis: what the means are over, such as "over 20 steps".
        methods: the names of the two methods, for a verdict.
        runs: the names of their runs, for a description without a verdict.
        family: how many comparisons the p-value was corrected for.
        equal: whether all values are the same.
    """
    if equal:
        head = f"The {measure}s of {runs[0]} and {runs[1]} are equal."
        return Judgement(verdict=comparison.verdict, head=head, text=f"All of them are, {basis}.")
    first = number(comparison.first)
    second = number(comparison.second)
    difference = format_signed(comparison.difference)
    if comparison.verdict is None:
        text = f"Means {basis}; the latter minus the former: {difference}"
        if comparison.over == QUESTIONS:
            text += f", {interval_of(comparison)} over problems, which speaks only of these runs"
        why = "all seeds differ by the same, so nothing says how far chance goes."
        if describe_too_few_seeds(comparison.seeds):
            why = (
                f"runs of one setting differ too. A verdict takes {MIN_SEEDS} seeds of each setting; here are "
                f"{comparison.seeds[0]} and {comparison.seeds[1]}."
            )
        head = f"The {measure} was {first} in {runs[0]} and {second} in {runs[1]}."
        return Judgement(
            verdict=None, head=head, text=f"{text}.", caveat=f"This does not say which method is better: {why}"
        )
    verdict = "cannot be told apart from that of" if comparison.verdict == ALIKE else f"is {comparison.verdict}"
    over = "seeds" if comparison.over == SEEDS else "seeds and problems"
    several = ""
    if family > 1:
        several = f", Holm’s over {family} comparisons, for which the interval is not corrected"
    return Judgement(
        verdict=comparison.verdict,
        head=f"The {measure} of {methods[1]} {verdict} {methods[0]}.",
        text=f"The mean {basis} is {first} with {methods[0]} and {second} with {methods[1]}. {methods[1]} minus "
        f"{methods[0]}: {difference}, {interval_of(comparison)} over {over}, {comparison.seeds[1]} and "
        f"{comparison.seeds[0]} seeds ({comparison.p_text}{several}).",
    )


def format_signed(difference: float) -> str:
    """Write a difference with its sign, also if that is a plus."""
    return f"{'+' if difference > 0 else ''}{number(difference)}"


def interval_of(comparison: Comparison) -> str:
    """Write the interval of a comparison that has one."""
    return f"95\u202f% interval {number(comparison.low)} to {number(comparison.high)}"
