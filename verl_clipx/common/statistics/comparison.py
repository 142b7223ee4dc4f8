"""Whether one method is better than another: one inference over training seeds and questions together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.estimate import MIN_SEEDS, ROUNDING
from verl_clipx.common.statistics.variance import CONFIDENCE, effective_units, residuals, squared_error, too_few_units

LEVEL = 0.05
"""A p-value below it, Holm's where there are several, is a claim; docs/dev/evaluation.md counts the false ones."""

HIGHER, LOWER, ALIKE = "higher than that of", "lower than that of", "not told apart from that of"
"""The verdicts on the second method against the first."""

SEEDS_AND_QUESTIONS, SEEDS, QUESTIONS = "seeds and questions", "seeds", "questions"

Benchmarks = Mapping[str, np.ndarray]
"""By benchmark ``[seeds, questions]`` float64. What is compared is the sum over benchmarks of the mean over questions:
for a mean of benchmarks the values have been multiplied by its weights."""


@dataclass(frozen=True)
class Comparison:
    """Difference of two methods or checkpoints, second minus first.

    Args:
        low, high: ends of the 95 % interval; None if it is refused.
        p_value: two-sided; None if it is refused.
        over: what interval and p-value are over: `SEEDS_AND_QUESTIONS` and `SEEDS` speak of the methods, `QUESTIONS`
            only of these two checkpoints; None if they are refused.
        error: squared standard error of the difference by its parts, "question" and "seed".
        wins, losses, ties: questions on which the second is better, worse, equal.
        refused: why there is no interval on the methods.
    """

    first: float
    second: float
    difference: float
    seeds: tuple[int, int]
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    over: str | None = None
    error: Mapping[str, float] | None = None
    wins: int | None = None
    losses: int | None = None
    ties: int | None = None
    refused: str | None = None

    @property
    def is_of_methods(self) -> bool:
        """Returns whether it has a p-value that speaks of the methods, not only of two checkpoints."""
        return self.over in (SEEDS, SEEDS_AND_QUESTIONS)

    @property
    def verdict(self) -> str | None:
        """`HIGHER`, `LOWER` or `ALIKE`; None if nothing is said about the methods."""
        if not self.is_of_methods:
            return None
        if self.p_value >= LEVEL:
            return ALIKE
        return HIGHER if self.difference > 0 else LOWER

    @property
    def p_text(self) -> str:
        """Returns the p-value as it is printed."""
        return "p < 0.001" if self.p_value < 0.001 else f"p {self.p_value:.3f}"


def correct_family(family: Sequence[Comparison]) -> list[Comparison]:
    """Gives a family of comparisons Holm's p-values; those that say nothing about methods are no members and stay."""
    adjusted = holm([one.p_value if one.is_of_methods else None for one in family])
    return [one if p is None else replace(one, p_value=p) for one, p in zip(family, adjusted, strict=True)]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values: rejecting those below 5 % makes one false rejection or more in at most 5 % of families.

    In ascending order the i-th of n, from 0, is multiplied by n - i; none is smaller than the one before, none above 1.
    Holm, A Simple Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: those of one family; None is no member, and stays.
    """
    known = np.array([one for one in p_values if one is not None], dtype=np.float64)
    order = np.argsort(known, kind="stable")
    known[order] = np.maximum.accumulate(known[order] * np.arange(len(order), 0, -1))
    adjusted = iter(np.minimum(known, 1.0).tolist())
    return [None if one is None else next(adjusted) for one in p_values]


def compare(first: Benchmarks, second: Benchmarks, clusters: Mapping[str, np.ndarray] | None = None) -> Comparison:
    """Compare two methods, each trained with several seeds, on the same questions.

    Target: the difference of the methods' expected scores, where both the trainings and the questions are draws from
    all that could have been drawn. Questions are paired between the methods, seeds are not.

    The squared standard error is unbiased: the variance over questions of the paired difference of means over seeds,
    plus each method's variance between seeds, less the part of the latter that questions and samples explain, which the
    former holds already. If that leaves nothing for the seeds, only the questions' part remains. The interval is
    Student's with Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946), of which unequal numbers of seeds
    get no more than equal ones: see `_seeds_spread`.

    Args:
        first, second: see `Benchmarks`; the same questions in the same order.
        clusters: by benchmark ``[questions]`` labels, where questions share a source.

    Returns:
        With one training on both sides, the interval over questions, which speaks only of these two; otherwise, with
        fewer than `MIN_SEEDS` on a side, no interval.

    Raises:
        ValueError: the two have different benchmarks or questions, or there are no values.
    """
    if not first or list(first) != list(second):
        raise ValueError(f"both need values on the same benchmarks, got {list(first)} and {list(second)}")
    for name, one, other in ((name, first[name], second[name]) for name in first):
        if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1] or not (one.size and other.size):
            raise ValueError(f"{name}: both need [seeds, questions] values, got shapes {one.shape} and {other.shape}")
    clusters = clusters or {}
    means = [sum(values.mean(axis=1) for values in side.values()) for side in (first, second)]
    by_question = {name: second[name].mean(axis=0) - first[name].mean(axis=0) for name in first}
    every = np.concatenate(list(by_question.values()))
    seeds = (len(means[0]), len(means[1]))
    wins, losses, ties = (int(count.sum()) for count in (every > 0, every < 0, every == 0))
    described = replace(_describe(means[0], means[1]), wins=wins, losses=losses, ties=ties)
    units = {name: (len(values), clusters.get(name)) for name, values in by_question.items()}
    few = [f"{name}: {reason}" for name, of in units.items() if (reason := too_few_units(*of))]
    if few or (described.refused and seeds != (1, 1)):
        return replace(described, refused="; ".join(filter(None, [described.refused, *few])))
    of_question = [float(squared_error(values, clusters.get(name))) for name, values in by_question.items()]
    spread = sum(part**2 / (effective_units(*of) - 1) for part, of in zip(of_question, units.values(), strict=True))
    if seeds == (1, 1):
        return _student(described, QUESTIONS, sum(of_question), 0.0, spread)
    of_seed = [float(one.var(ddof=1) / len(one)) for one in means]
    explained = sum(_explained(side, clusters) for side in (first, second))
    seed_part = max(0.0, sum(of_seed) - explained)
    if seed_part:
        spread += _seeds_spread(of_seed, seeds)
    return _student(described, SEEDS_AND_QUESTIONS, sum(of_question), seed_part, spread)


def compare_means(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two methods by one number a training: Welch's interval over seeds, the questions taken as given.

    For numbers without questions, such as a validation's accuracy in a log.

    Raises:
        ValueError: a side has no number.
    """
    first, second = (np.asarray(side, dtype=np.float64) for side in (first, second))
    if not (len(first) and len(second)):
        raise ValueError("a number of at least one training is needed of both methods")
    described = _describe(first, second)
    if described.refused:
        return described
    parts = [float(one.var(ddof=1) / len(one)) for one in (first, second)]
    return _student(described, SEEDS, 0.0, sum(parts), _seeds_spread(parts, described.seeds))


def compare_shares(first: Sequence[object], second: Sequence[object]) -> Comparison:
    """Compare the shares of two methods' trainings to which something happened, such as a collapse.

    Boschloo's exact test (Statistica Neerlandica 24, 1970), which makes at most 5 % false claims with any number of
    seeds and finds more than Fisher's: 3 of 3 against 0 of 3 has p 0.031. There is no interval; `share` gives each
    method's.

    For each training a value is given that is true if it happened, such as the step.
    """
    first, second = (np.asarray(side, dtype=bool) for side in (first, second))
    described = _describe(*(side.astype(np.float64) for side in (first, second)))
    if described.refused:
        return described
    table = [[int(np.sum(side == value)) for side in (first, second)] for value in (True, False)]
    p_value = float(stats.boschloo_exact(table).pvalue) if described.difference else 1.0
    return replace(described, p_value=p_value, over=SEEDS)


def _describe(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Returns the means of two methods' trainings, without any inference."""
    means, seeds = [float(side.mean()) for side in (first, second)], (len(first), len(second))
    return Comparison(*means, float(second.mean() - first.mean()), seeds, refused=too_few_seeds(seeds))


def too_few_seeds(seeds: tuple[int, int]) -> str | None:
    """Says why two methods with so many trainings get no interval; None if they get one."""
    if min(seeds) >= MIN_SEEDS:
        return None
    return f"{seeds[0]} and {seeds[1]} training seeds; whether a method is better takes {MIN_SEEDS} of each"


def _seeds_spread(parts: Sequence[float], seeds: tuple[int, int]) -> float:
    """Divides the squared parts of the seeds by their degrees of freedom, at most those of equally few seeds of both.

    Satterthwaite's formula relies on the side with many seeds where that varies more by chance: without the limit of
    2 (fewest seeds - 1), 3 and 10 seeds of one setting were told apart in 6.3 % of the cases, with it in 4.1 %.
    """
    own = sum(part**2 / (count - 1) for part, count in zip(parts, seeds, strict=True))
    return max(own, sum(parts) ** 2 / (2 * (min(seeds) - 1)))


def _explained(side: Benchmarks, clusters: Mapping[str, np.ndarray]) -> float:
    """Returns what residuals of questions and samples explain of a method's variance of seed means, over seeds."""
    seeds = len(next(iter(side.values())))
    return sum(
        float(squared_error(residuals(values), clusters.get(name)).sum()) / (seeds * (seeds - 1))
        for name, values in side.items()
    )


def _student(described: Comparison, over: str, question: float, seed: float, spread: float) -> Comparison:
    """Adds interval and p-value; `spread` is the sum of squared parts over their degrees of freedom."""
    variance = question + seed
    if variance <= (ROUNDING * max(abs(described.first), abs(described.second))) ** 2:
        variance = 0.0
    if not variance and described.difference:
        # For instance 4 questions, all wrong before and all right after, which is no certainty.
        reason = "all seeds and questions differ by the same: nothing to take an error from"
        return replace(described, refused="; ".join(filter(None, [described.refused, reason])))
    half, p_value = 0.0, 1.0
    if variance:
        freedom = variance**2 / spread
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance))
        p_value = float(2 * stats.t.sf(abs(described.difference) / np.sqrt(variance), freedom))
    return replace(
        described,
        low=described.difference - half,
        high=described.difference + half,
        p_value=p_value,
        over=over,
        error={"question": question, "seed": seed},
    )
