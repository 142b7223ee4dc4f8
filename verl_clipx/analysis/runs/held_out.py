"""Reward on held-out problems with a confidence interval, from the generations that verl's validation writes."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy

from verl_clipx.common.files import file_names_in, parse_json, read_lines
from verl_clipx.common.statistics.estimate import Estimate, estimate

# The file of a validation is named by its step. A longer number would not fit into an integer of 64 bits.
FILE_OF_STEP = re.compile(r"[0-9]{1,18}\.jsonl")


@dataclass(frozen=True)
class HeldOutReward:
    """The reward of one validation on held-out problems, over the samples whose scores are finite.

    Args:
        step: the training step after which the validation ran.
        reward: the mean over problems; the value of a problem is the mean over its samples. The interval is over
            problems, since only these are independent of each other.
        by_problem: from the prompt of each problem to the mean over its samples.
        not_finite: the number of samples whose score is NaN, infinite or null.
        length: the mean number of characters of an answer; NaN if the file has no answers, or only empty ones.
        samples: the number of samples of the problem that has the most. Those without a finite score count too.
    """

    step: int
    reward: Estimate
    by_problem: dict[str, float]
    not_finite: int = 0
    length: float = math.nan
    samples: int = 1


def read_held_out_rewards(folder: Path) -> list[HeldOutReward]:
    """Return the reward of each validation of a run, in the order of their steps.

    Args:
        folder: the run's trainer.validation_data_dir, which may be missing. It has a file `<step>.jsonl` for each
            validation, with a line for each sample: a JSON object with `input` and `score`, and perhaps `output`.
            Other files are ignored.

    Raises:
        OSError: the folder cannot be read.
        ValueError: a file is empty, or a line is not such an object; the message names the file or the line.
    """
    paths = [folder / name for name in file_names_in(folder) if FILE_OF_STEP.fullmatch(name)]
    paths.sort(key=lambda path: int(path.stem))
    return [_read_validation(path) for path in paths]


def _read_validation(path: Path) -> HeldOutReward:
    """Read the file of one validation; raise ValueError as `read_held_out_rewards` does."""
    scores: dict[str, list[float]] = {}
    lengths: list[int] = []
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        entry = parse_json(line, where)
        try:
            score = math.nan if entry["score"] is None else float(entry["score"])
            problem = str(entry["input"])
            answer = entry.get("output")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{where}: needs `input`, and a number as `score`. To go on without this validation, remove the file."
            ) from None
        scores.setdefault(problem, []).append(score)
        if answer is not None:
            lengths.append(len(str(answer)))
    if not scores:
        raise ValueError(f"{path}: empty. To go on without this validation, remove the file.")
    finite_scores: dict[str, list[float]] = {}
    for problem, values in scores.items():
        finite_scores[problem] = [value for value in values if math.isfinite(value)]
    by_problem = {problem: float(numpy.mean(values)) for problem, values in finite_scores.items() if values}
    number_of_samples = sum(len(values) for values in scores.values())
    number_of_finite = sum(len(values) for values in finite_scores.values())
    return HeldOutReward(
        step=int(path.stem),
        reward=estimate(list(by_problem.values())) if by_problem else Estimate(math.nan),
        by_problem=by_problem,
        not_finite=number_of_samples - number_of_finite,
        length=float(numpy.mean(lengths)) if any(lengths) else math.nan,
        samples=max(len(values) for values in scores.values()),
    )
