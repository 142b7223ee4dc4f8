"""Before spending: the probability of detecting a difference with given numbers of questions, samples and seeds."""

from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.estimate import MIN_SEEDS
from verl_clipx.common.statistics.variance import CONFIDENCE, split_variance

POWER = 0.8
"""The power that a design should have, as is usual."""

MOST = {"questions": 1_000_000, "samples": 4096, "seeds": 1000}
"""The largest numbers of a design; the search for a design ends there too."""


@dataclass(frozen=True)
class Parts:
    """What makes the difference of two methods vary, as variances of a 0/1 score.

    Args:
        method: between questions, of the true difference of the two methods.
        seed: between trainings of one method, the mean over questions.
        interaction: between trainings of one method on one question, beyond that.
        sample: between samples of one training on one question.
    """

    method: float
    seed: float
    interaction: float
    sample: float

    def __post_init__(self) -> None:
        for part, value in asdict(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{part}={value}: a variance is a number and at least 0")


@dataclass(frozen=True)
class Design:
    """What is spent on each of two methods."""

    questions: int
    """At least 2; like the other two, at most `MOST`."""

    samples: int
    """Samples of a training on a question, at least 1."""

    seeds: int
    """Trainings: 1, which compares two checkpoints as they are, or at least `MIN_SEEDS`."""

    def __post_init__(self) -> None:
        for what, least in (("questions", 2), ("samples", 1), ("seeds", 1)):
            if not least <= getattr(self, what) <= MOST[what]:
                raise ValueError(f"--{what} {getattr(self, what)}: must be from {least} to {MOST[what]}")
        if self.seeds != 1 and self.seeds < MIN_SEEDS:
            raise ValueError(
                f"--seeds {self.seeds}: `clipx eval compare` takes {MIN_SEEDS} of each method, or 1 to compare two "
                "checkpoints as they are"
            )


def assumed_parts(accuracy: float, spread: float, agreement: float, seed_deviation: float) -> Parts:
    """Variances from what can be guessed before there is any run.

    A 0/1 score of mean p has the variance p (1 - p); `spread` of it lies between questions, the rest between samples of
    one. Of the part between questions, 1 - `agreement` is a training's own; half of that is the method's, half the
    seed's.

    Args:
        accuracy: of the baseline, in (0, 1).
        spread: share of the variance that is between questions, in [0, 1]: 0 if all are equally hard, 1 if each is
            always or never solved.
        agreement: correlation over questions of two trainings' chances, in [0, 1].
        seed_deviation: standard deviation of the accuracy between trainings, in [0, 1).

    Raises:
        ValueError: a number is out of its range; names the option.
    """
    if not 0 < accuracy < 1:
        raise ValueError(f"--accuracy {accuracy}: must be in (0, 1)")
    for name, value in (("spread", spread), ("agreement", agreement)):
        if not 0 <= value <= 1:
            raise ValueError(f"--{name} {value}: must be in [0, 1]")
    if not 0 <= seed_deviation < 1:
        raise ValueError(f"--seed-deviation {100 * seed_deviation}: must be at least 0 points and below 100")
    total = accuracy * (1 - accuracy)
    own = total * spread * (1 - agreement)
    # The difference contains the part of both methods.
    return Parts(method=own, seed=seed_deviation**2, interaction=own / 2, sample=total * (1 - spread))


def measured_parts(first: np.ndarray, second: np.ndarray | None, samples: int | None) -> dict[str, float]:
    """The parts that earlier runs tell; those that they cannot tell are left out.

    Args:
        first: ``[seeds, questions]`` shares of right samples of one method.
        second: those of another method on the same questions, if there is one.
        samples: how many are behind each share; None if that differs, or they are not samples of one model.
    """
    splits = [split_variance(side, samples) for side in (first, second) if side is not None]
    found = {}
    for part in ("seed", "interaction", "sample"):
        values = [value for split in splits if (value := getattr(split, part)) is not None]
        if values:
            found[part] = float(np.mean(values))
    if "sample" not in found:
        # The interaction then contains the samples' part, which shrinks with more samples.
        found.pop("interaction", None)
    if second is not None:
        noise = sum(
            ((split.interaction or 0.0) + (split.sample or 0.0) / (samples or 1)) / len(side)
            for split, side in zip(splits, (first, second), strict=True)
        )
        found["method"] = max(0.0, float((second.mean(axis=0) - first.mean(axis=0)).var(ddof=1) - noise))
    return found


def power_of(parts: Parts, difference: float, design: Design) -> float:
    """Chance that the 95 % interval of `compare` leaves out 0.

    The difference's squared standard error is (method + 2 (interaction + sample / samples) / seeds) / questions +
    2 seed / seeds; Miller, Adding Error Bars to Evals (arXiv 2411.00640), on power, has it without seeds. With few
    seeds the estimate of the error varies so much that the chance has no short formula: the mean squares that `compare`
    sees are drawn, each a chi-squared number, and the chance is a mean over the draws, exact to about 0.01.

    Args:
        design: what is spent. With 1 seed the trainings are taken as they are: what they differ by is what is looked
            for, so that `seed` adds no error.
    """
    questions, seeds = design.questions, design.seeds
    noise = parts.interaction + parts.sample / design.samples
    of_questions = (parts.method + 2 * noise / seeds) / questions
    if of_questions == 0 and (seeds == 1 or parts.seed == 0):
        return 1.0
    generator = np.random.default_rng(0)
    variance, spread, error = np.zeros(_DRAWS), np.zeros(_DRAWS), of_questions
    if seeds > 1:
        error += 2 * parts.seed / seeds
        explained = noise / (seeds * questions)
        between = (parts.seed / seeds + explained) * _mean_squares(generator, seeds - 1, 2)
        residual = explained * _mean_squares(generator, (seeds - 1) * (questions - 1), 2)
        variance = np.maximum(0.0, between.sum(axis=0) - residual.sum(axis=0))
        spread = np.where(variance > 0, (between**2).sum(axis=0) / (seeds - 1), 0.0)
    question = of_questions * _mean_squares(generator, questions - 1, 1)[0]
    variance, spread = variance + question, spread + question**2 / (questions - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, variance**2 / spread) * np.sqrt(variance)
    deviation = np.sqrt(error)
    return float(
        (stats.norm.sf((half - difference) / deviation) + stats.norm.cdf((-half - difference) / deviation)).mean()
    )


_DRAWS = 4000


def _mean_squares(generator: np.random.Generator, freedom: int, count: int) -> np.ndarray:
    return generator.chisquare(freedom, (count, _DRAWS)) / freedom


def needed(parts: Parts, difference: float, design: Design, what: str, power: float = POWER) -> Design | None:
    """The smallest design with a power, in which only one number differs from the given ones.

    Args:
        design: gives the other two numbers.
        what: the number to find: questions, samples or seeds.

    Returns:
        The design; None if even `MOST` does not reach the power.
    """
    least = {"questions": 2, "samples": 1, "seeds": MIN_SEEDS}[what]

    def reaches(number: int) -> bool:
        return power_of(parts, difference, replace(design, **{what: number})) >= power

    high = least
    while not reaches(high):
        if high == MOST[what]:
            return None
        high = min(2 * high, MOST[what])
    low = max(least, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return replace(design, **{what: high})
