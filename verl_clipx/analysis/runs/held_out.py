"""Reward on held-out problems with a confidence interval, from the generations that verl's validation writes."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy

from verl_clipx.common.files import file_names_in, parse_json, read_lines
from verl_clipx.common.statistics.estimate import Estimate, estimate


@dataclass(frozen=True)
class HeldOutReward:
    """Mean reward on held-out problems, over the samples whose scores are finite.

    Args:
        reward: mean over problems of the mean over a problem's samples, with its interval over problems, which are the
            independent units.
        by_problem: the mean over the samples of each problem, by its prompt.
        not_finite: number of samples whose score is NaN, infinite or null.
        length: mean number of characters of a sample's answer; NaN if the file has no answers.
        samples: of the problem that has most.
    """

    step: int
    reward: Estimate
    by_problem: dict[str, float]
    not_finite: int = 0
    length: float = math.nan
    samples: int = 1


def held_out_rewards(folder: Path) -> list[HeldOutReward]:
    """Returns the rewards of every validation, by step.

    Args:
        folder: trainer.validation_data_dir of the run; holds one `<step>.jsonl` a validation, with `input` and `score`
            on each line. It may be missing.

    Raises:
        OSError: the folder cannot be read.
        ValueError: a file is empty or of something else; names the line.
    """
    found = [folder / name for name in file_names_in(folder) if re.fullmatch(r"[0-9]{1,18}\.jsonl", name)]
    return [_read(path) for path in sorted(found, key=lambda path: int(path.stem))]


def _read(path: Path) -> HeldOutReward:
    scores: dict[str, list[float]] = {}
    lengths: list[int] = []
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        entry = parse_json(line, where)
        try:
            score = math.nan if entry["score"] is None else float(entry["score"])
            scores.setdefault(str(entry["input"]), []).append(score)
            lengths.append(len(str(entry.get("output", ""))))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{where}: no `input` with a number `score`; remove the file to go on without it"
            ) from None
    if not scores:
        raise ValueError(f"{path}: empty; remove it to go on without it")
    finite = {problem: [value for value in values if math.isfinite(value)] for problem, values in scores.items()}
    by_problem = {problem: float(numpy.mean(values)) for problem, values in finite.items() if values}
    reward = estimate(list(by_problem.values())) if by_problem else Estimate(math.nan)
    samples, known = (sum(map(len, of_problem.values())) for of_problem in (scores, finite))
    length = float(numpy.mean(lengths)) if any(lengths) else math.nan
    most = max(map(len, scores.values()))
    return HeldOutReward(int(path.stem), reward, by_problem, samples - known, length, most)
