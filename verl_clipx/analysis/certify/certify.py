"""`clipx certify`: the arms on its command line, and its answer."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_clipx.analysis.certify.arms import Answer, Arms, Verdict
from verl_clipx.analysis.certify.questions import answers_of
from verl_clipx.analysis.runs.folder import read_run

BETWEEN = "vs"


def certify(words: Sequence[str], vary: Sequence[str]) -> list[Answer]:
    """Answers every question about the runs of two arms.

    Args:
        words: the paths of the runs, with `vs` between those of the two arms.
        vary: names of what must differ between the arms, or patterns of them; nothing else may. Without any it is the
            loss.

    Raises:
        ValueError: there is no `vs` with a run on each side, or a run cannot be read.
        FileNotFoundError: a run has no log.
    """
    if [*words].count(BETWEEN) != 1 or words[0] == BETWEEN or words[-1] == BETWEEN:
        raise ValueError(f"{' '.join(words)}: name the runs of two arms: clipx certify A1 A2 {BETWEEN} B1 B2")
    cut = words.index(BETWEEN)
    first = [read_run(Path(word)) for word in words[:cut]]
    second = [read_run(Path(word)) for word in words[cut + 1 :]]
    return answers_of(Arms(first, second, vary))


def exit_code(answers: Sequence[Answer]) -> int:
    """Returns 0 if every question passed, 1 if one failed, else 3: some have no evidence."""
    verdicts = {answer.verdict for answer in answers}
    if Verdict.FAILED in verdicts:
        return 1
    return 3 if Verdict.UNKNOWN in verdicts else 0


def lines_of(answers: Sequence[Answer]) -> list[str]:
    """Returns the answer in lines: a count of the verdicts, then a question a line."""
    counts = Counter(answer.verdict for answer in answers)
    count = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    return [
        f"{len(answers)} questions: {count}",
        *(f"  {answer.verdict.value + ':':14}{answer.question}: {answer.evidence}" for answer in answers),
    ]
