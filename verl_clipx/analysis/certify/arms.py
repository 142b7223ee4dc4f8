"""Two arms of runs, what a question about them is, and how it is answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from verl_clipx.analysis.runs.run import Run


class Verdict(Enum):
    """What became of a question, with the word that the command prints for it."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "not recorded"


class Outcome(NamedTuple):
    """The verdict on a question, and the evidence in words."""

    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Answer:
    """A question, in the words of the output, with what became of it."""

    question: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Arms:
    """Two arms of runs.

    Args:
        first: the runs of the first arm, at least one.
        second: those of the second arm, at least one.
        vary: patterns of the keys in which the arms are to differ; empty for the loss.
    """

    first: Sequence[Run]
    second: Sequence[Run]
    vary: Sequence[str] = ()

    @property
    def pair(self) -> tuple[Sequence[Run], Sequence[Run]]:
        """Returns the runs of the first arm and those of the second."""
        return self.first, self.second

    @property
    def runs(self) -> list[Run]:
        """Returns all runs, those of the first arm first."""
        return [*self.first, *self.second]


@dataclass(frozen=True)
class Question:
    """A question about two arms.

    Args:
        text: the question as a statement, which is true if the question passed.
        ask: decides the question for two arms. It is called only if every run has what the question needs.
        needs: what a run must have for the question to be asked, in words; empty for nothing.
        has: returns whether a run has it; called only if something is needed.
    """

    text: str
    ask: Callable[[Arms], Outcome]
    needs: str = ""
    has: Callable[[Run], Any] = bool

    def answer(self, arms: Arms) -> Answer:
        """Return the answer. It is "not recorded" where a run lacks what the question needs."""
        lacking: list[str] = []
        if self.needs:
            lacking = [run.name for run in arms.runs if not self.has(run)]
        if lacking:
            return Answer(
                question=self.text,
                verdict=Verdict.UNKNOWN,
                evidence=f"{self.needs}: not recorded in {listed(lacking)}",
            )
        outcome = self.ask(arms)
        return Answer(question=self.text, verdict=outcome.verdict, evidence=outcome.evidence)


def question(text: str, *, needs: str = "", has: Callable[[Run], Any] = bool) -> Callable[..., Question]:
    """Make the decorated function a question; the arguments are as in `Question`."""

    def declare(ask: Callable[[Arms], Outcome]) -> Question:
        return Question(text=text, ask=ask, needs=needs, has=has)

    return declare


def decided(wrong: Sequence[str], right: str, unknown: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a question.

    Args:
        wrong: messages on what is wrong. With any of them the question has failed.
        right: the evidence if it passed.
        unknown: texts on what is not recorded, each of which can follow the words "no record of". With any of them, and
            nothing wrong, the verdict is `UNKNOWN`.
    """
    if wrong:
        return Outcome(Verdict.FAILED, "; ".join(wrong))
    if unknown:
        return Outcome(Verdict.UNKNOWN, f"no record of {'; '.join(unknown)}")
    return Outcome(Verdict.PASSED, right)


def listed(texts: Sequence[str], most: int = 4) -> str:
    """Return the first texts with commas between them, and how many more there are; "" if there is none.

    Args:
        texts: names, hashes or clauses.
        most: how many of them are in the result at most.
    """
    first_texts = ", ".join(texts[:most])
    if len(texts) > most:
        return f"{first_texts} and {len(texts) - most} more"
    return first_texts


def unrecorded_second_runs(arms: Arms) -> list[str]:
    """Return what `decided` takes as `unknown` where an arm has a single run, and therefore a single seed.

    Returns:
        One text on the arms with a single run; an empty list if each arm has two runs or more.
    """
    names = [arm[0].name for arm in arms.pair if len(arm) == 1]
    if not names:
        return []
    lacking = [f"a second run in the arm of {name}" for name in names]
    return [f"{' and of '.join(lacking)}, since one seed supports no comparison"]
