"""`clipx certify`: the arms on its command line, and its answer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_clipx.analysis.certify.arms import Answer, Arms, Verdict
from verl_clipx.analysis.certify.questions import answers_of
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.run_files import METRICS

# The word between the runs of the two arms on the command line.
SEPARATOR = "vs"
# The width of the column of verdicts: the longest one with its colon, "not recorded:", and a blank.
WIDTH_OF_VERDICT = 14


def certify(words: Sequence[str], vary: Sequence[str]) -> list[Answer]:
    """Answer every question about the runs of two arms, in the order of the questions.

    Args:
        words: the paths of the runs, with `vs` between those of the two arms.
        vary: keys in which the arms must differ, or patterns of keys; they may differ in nothing else. If it is empty,
            the arms must differ in the loss.

    Raises:
        ValueError: there is no `vs` with a run on each side, or a run cannot be read.
        FileNotFoundError: a run has no log.
    """
    if [*words].count(SEPARATOR) != 1 or SEPARATOR in (words[0], words[-1]):
        raise ValueError(f"{' '.join(words)}: name the runs of two arms: clipx certify A1 A2 {SEPARATOR} B1 B2")
    paths_of_first = [Path(word) for word in words[: words.index(SEPARATOR)]]
    paths_of_second = [Path(word) for word in words[words.index(SEPARATOR) + 1 :]]
    runs = _read_runs([*paths_of_first, *paths_of_second])
    first = runs[: len(paths_of_first)]
    second = runs[len(paths_of_first) :]
    return answers_of(Arms(first=first, second=second, vary=vary))


def _read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs. Texts tell those of the same name apart by the path of the folder that the run is in.

    Args:
        paths: the paths of the runs, as for `read_run`.
    """
    runs = [read_run(path) for path in paths]
    number_by_name = Counter(run.name for run in runs)
    named_apart: list[Run] = []
    for path, run in zip(paths, runs, strict=True):
        name = run.name
        if number_by_name[name] > 1:
            # The path is that of the run's folder, of the log in this folder, or of a log that is the whole run.
            run_path = path.parent if path.name == METRICS else path
            name = str(run_path.parent / name)
        named_apart.append(replace(run, name=name))
    return named_apart


def exit_code(answers: Sequence[Answer]) -> int:
    """Return 1 if a question failed, else 3 if one has no evidence, else 0: every question passed."""
    verdicts = {answer.verdict for answer in answers}
    if Verdict.FAILED in verdicts:
        return 1
    if Verdict.UNKNOWN in verdicts:
        return 3
    return 0


def format_answers(answers: Sequence[Answer]) -> list[str]:
    """Return what the command prints: a line that counts the verdicts, then a line for each answer.

    The line of an answer has its verdict, its question and its evidence.
    """
    number_by_verdict = Counter(answer.verdict for answer in answers)
    summary = ", ".join(f"{number_by_verdict[verdict]} {verdict.value}" for verdict in Verdict)
    lines = [f"{len(answers)} questions: {summary}"]
    for answer in answers:
        verdict = f"{answer.verdict.value}:".ljust(WIDTH_OF_VERDICT)
        lines.append(f"  {verdict}{answer.question}: {answer.evidence}")
    return lines
