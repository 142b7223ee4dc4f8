"""Two arms of runs, what a question about them is, and how it is answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl_clipx.analysis.runs.run import Run


class Verdict(Enum):
    """An answer to a question."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Answer:
    """A question with its verdict, and the evidence in words."""

    question: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Arms:
    """Two arms of runs, each at least one, and patterns of the keys in which the arms are to differ."""

    first: Sequence[Run]
    second: Sequence[Run]
    vary: Sequence[str] = field(default=())

    @property
    def both(self) -> tuple[Sequence[Run], Sequence[Run]]:
        """The two arms."""
        return self.first, self.second

    @property
    def runs(self) -> list[Run]:
        """All runs, those of the first arm first."""
        return [*self.first, *self.second]


# A verdict with its evidence in words.
Found = tuple[Verdict, str]


@dataclass(frozen=True)
class Question:
    """A question about two arms.

    Args:
        text: what is asked, as a statement that holds if the question passed.
        ask: returns the verdict with its evidence, of runs that all have what the question needs.
        needs: what that is, in words; empty for nothing.
        has: whether a run has it.
    """

    text: str
    ask: Callable[[Arms], Found]
    needs: str = ""
    has: Callable[[Run], Any] = bool

    def answer(self, arms: Arms) -> Answer:
        """Returns the answer; that nothing is recorded where a run lacks what the question needs."""
        lacking = [run.name for run in arms.runs if self.needs and not self.has(run)]
        if lacking:
            return Answer(self.text, Verdict.UNKNOWN, f"{self.needs}: not recorded in {listed(lacking)}")
        verdict, evidence = self.ask(arms)
        return Answer(self.text, verdict, evidence)


def question(text: str, needs: str = "", has: Callable[[Run], Any] = bool) -> Callable[..., Question]:
    """Makes the decorated function a question; the arguments are as in `Question`."""

    def declare(ask: Callable[[Arms], Found]) -> Question:
        return Question(text, ask, needs, has)

    return declare


def decided(wrong: Sequence[str], right: str, unknown: Sequence[str] = ()) -> Found:
    """Returns a failure with all that is wrong, else what is not recorded, else that the question passed."""
    if wrong:
        return Verdict.FAILED, "; ".join(wrong)
    if unknown:
        return Verdict.UNKNOWN, f"no record of {'; '.join(unknown)}"
    return Verdict.PASSED, right


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns names with commas between them, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def missing_seeds(arms: Arms) -> list[str]:
    """Returns what an arm of one run lacks, as `decided` takes what is not recorded; empty if both have two runs."""
    names = [arm[0].name for arm in arms.both if len(arm) == 1]
    if not names:
        return []
    return [f"a second run in the arm of {' and in that of '.join(names)}: one seed supports no comparison"]
