"""Reward on held-out problems with a confidence interval, from the generations that verl's validation writes."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy
from scipy import stats


@dataclass(frozen=True)
class HeldOutReward:
    """Mean reward on held-out problems.

    Args:
        step: training step of the validation.
        mean: mean over problems of the mean over a problem's samples.
        low, high: ends of the 95 % confidence interval over problems.
        problems: number of problems.
        samples: number of samples in all.
    """

    step: int
    mean: float
    low: float
    high: float
    problems: int
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def held_out_rewards(folder: Path) -> list[HeldOutReward]:
    """The rewards of every validation in a folder, by step.

    Problems are the independent units, so the interval is Student's over the problems' means, not over samples.

    Args:
        folder: trainer.validation_data_dir of the run; holds one `<step>.jsonl` a validation.

    Returns:
        One entry a validation, in order of steps; empty if there is none.
    """
    return [held_out_reward(path) for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))]


def held_out_reward(path: Path) -> HeldOutReward:
    """The reward of one validation.

    Args:
        path: a `<step>.jsonl` of trainer.validation_data_dir, with `input` and `score` on each line.
    """
    scores: dict[str, list[float]] = {}
    for line in path.read_bytes().splitlines():
        entry = json.loads(line)
        scores.setdefault(entry["input"], []).append(float(entry["score"]))
    means = numpy.array([numpy.mean(values) for values in scores.values()])
    half = 0.0
    if len(means) > 1:
        half = float(stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / numpy.sqrt(len(means)))
    mean = float(means.mean())
    samples = sum(map(len, scores.values()))
    return HeldOutReward(int(path.stem), mean, max(0.0, mean - half), min(1.0, mean + half), len(means), samples)
