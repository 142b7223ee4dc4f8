"""Whether one method is better than another: one inference over training seeds and questions together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.estimate import MIN_SEEDS, ROUNDING
from verl_clipx.common.statistics.variance import CONFIDENCE, effective_units, residuals, squared_error, too_few_units

LEVEL = 0.05
"""A p-value below it, Holm's where there are several, is a claim; docs/evaluation.md counts the false ones."""

HIGHER = "higher than that of"
LOWER = "lower than that of"
ALIKE = "not told apart from that of"
"""The verdicts on the second method against the first."""

SEEDS_AND_QUESTIONS = "seeds and questions"
SEEDS = "seeds"
QUESTIONS = "questions"

Benchmarks = Mapping[str, np.ndarray]
"""By benchmark ``[seeds, questions]`` float64. What is compared is the sum over benchmarks of the mean over questions:
for a mean of benchmarks the values have been multiplied by its weights."""


@dataclass(frozen=True)
class Comparison:
    """Difference of two methods or checkpoints, second minus first.

    Args:
        first, second: what is compared of each method.
        difference: the second minus the first.
        seeds: how many trainings there are of each method.
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
    def speaks_of_methods(self) -> bool:
        """Returns whether it has a p-value that speaks of the methods, not only of two checkpoints."""
        return self.over in (SEEDS, SEEDS_AND_QUESTIONS)

    @property
    def verdict(self) -> str | None:
        """Returns `HIGHER`, `LOWER` or `ALIKE`; None if nothing is said about the methods."""
        if not self.speaks_of_methods:
            return None
        if self.p_value >= LEVEL:
            return ALIKE
        return HIGHER if self.difference > 0 else LOWER

    @property
    def p_text(self) -> str:
        """Returns the p-value as it is printed."""
        return "p < 0.001" if self.p_value < 0.001 else f"p {self.p_value:.3f}"


def correct_family(family: Sequence[Comparison]) -> list[Comparison]:
    """Returns a family of comparisons with p-values adjusted by Holm's method, in its order.

    Only comparisons that say something about the methods are adjusted and counted. The others are returned as they are.
    """
    p_values = [comparison.p_value if comparison.speaks_of_methods else None for comparison in family]
    corrected = []
    for comparison, p_value in zip(family, holm(p_values), strict=True):
        if p_value is None:
            corrected.append(comparison)
        else:
            corrected.append(replace(comparison, p_value=p_value))
    return corrected


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values of one family, adjusted by Holm's method, in their order.

    If adjusted p-values below 5 % are taken for discoveries, at most 5 % of families have a false one. In ascending
    order, the i-th of n p-values, counted from 0, is multiplied by n - i. Then each is raised to the one before it if
    that is larger, and lowered to 1 if it is above 1.
    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: None stands for a comparison that does not belong to the family. It is not counted, and stays None.
    """
    places = [place for place, p_value in enumerate(p_values) if p_value is not None]
    values = np.array([p_values[place] for place in places], dtype=np.float64)
    ascending = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    raised = np.maximum.accumulate(values[ascending] * factors)
    adjusted: list[float | None] = [None] * len(p_values)
    for index, p_value in zip(ascending, np.minimum(raised, 1.0).tolist(), strict=True):
        adjusted[places[index]] = p_value
    return adjusted


def compare(first: Benchmarks, second: Benchmarks, clusters: Mapping[str, np.ndarray] | None = None) -> Comparison:
    """Compare two methods, each trained with several seeds, on the same questions.

    Target: the difference of the methods' expected scores, where both the trainings and the questions are draws from
    all that could have been drawn. Questions are paired between the methods, seeds are not.

    The squared standard error is unbiased. It is the variance over questions of the paired difference of means over
    seeds, plus each method's variance between seeds. Questions and samples explain a part of the variance between
    seeds. That part is subtracted, since the variance over questions holds it already. If this leaves nothing for the
    seeds, only the questions' part remains.

    The interval is Student's with Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946). Unequal numbers of
    seeds get no more of these than equal ones: see `_seeds_spread`.

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
    for name in first:
        _check_shapes(name, first[name], second[name])
    clusters = clusters or {}
    first_means = sum(values.mean(axis=1) for values in first.values())
    second_means = sum(values.mean(axis=1) for values in second.values())
    by_question = {name: second[name].mean(axis=0) - first[name].mean(axis=0) for name in first}
    differences = np.concatenate(list(by_question.values()))
    seed_counts = (len(first_means), len(second_means))
    described = replace(
        _describe(first_means, second_means),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )
    too_few = []
    for name, values in by_question.items():
        reason = too_few_units(len(values), clusters.get(name))
        if reason:
            too_few.append(f"{name}: {reason}")
    if too_few or (described.refused and seed_counts != (1, 1)):
        return replace(described, refused="; ".join(filter(None, [described.refused, *too_few])))
    question_part = 0.0
    # The sum of squared parts over their degrees of freedom.
    spread = 0.0
    for name, values in by_question.items():
        part = float(squared_error(values, clusters.get(name)))
        question_part += part
        spread += part**2 / (effective_units(len(values), clusters.get(name)) - 1)
    if seed_counts == (1, 1):
        return _student(described, QUESTIONS, question_part, 0.0, spread)
    of_seeds = [_squared_error_of_mean(first_means), _squared_error_of_mean(second_means)]
    explained = _explained(first, clusters) + _explained(second, clusters)
    seed_part = max(0.0, sum(of_seeds) - explained)
    if seed_part:
        spread += _seeds_spread(of_seeds, seed_counts)
    return _student(described, SEEDS_AND_QUESTIONS, question_part, seed_part, spread)


def _check_shapes(name: str, first: np.ndarray, second: np.ndarray) -> None:
    """Raises ValueError unless both have values of the same number of questions on a benchmark."""
    same_questions = first.ndim == 2 and second.ndim == 2 and first.shape[1] == second.shape[1]
    if not same_questions or not first.size or not second.size:
        raise ValueError(f"{name}: both need [seeds, questions] values, got shapes {first.shape} and {second.shape}")


def _squared_error_of_mean(values: np.ndarray) -> float:
    """Returns the squared standard error of the mean of independent values, (values,)."""
    return float(values.var(ddof=1) / len(values))


def compare_means(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two methods by one number a training: Welch's interval over seeds, the questions taken as given.

    For numbers without questions, such as a validation's accuracy in a log.

    Raises:
        ValueError: a side has no number.
    """
    first = np.asarray(first, dtype=np.float64)
    second = np.asarray(second, dtype=np.float64)
    if not (len(first) and len(second)):
        raise ValueError("a number of at least one training is needed of both methods")
    described = _describe(first, second)
    if described.refused:
        return described
    parts = [_squared_error_of_mean(first), _squared_error_of_mean(second)]
    return _student(described, SEEDS, 0.0, sum(parts), _seeds_spread(parts, described.seeds))


def compare_shares(first: Sequence[object], second: Sequence[object]) -> Comparison:
    """Compare the shares of two methods' trainings to which something happened, such as a collapse.

    Boschloo's exact test (Statistica Neerlandica 24, 1970), which makes at most 5 % false claims with any number of
    seeds and finds more than Fisher's: 3 of 3 against 0 of 3 has p 0.031. There is no interval; `share` gives each
    method's.

    Args:
        first, second: for each training of a method a value that is true if it happened, such as the step.
    """
    first = np.asarray(first, dtype=bool)
    second = np.asarray(second, dtype=bool)
    described = _describe(first.astype(np.float64), second.astype(np.float64))
    if described.refused:
        return described
    happened = [int(first.sum()), int(second.sum())]
    did_not_happen = [int((~first).sum()), int((~second).sum())]
    table = [happened, did_not_happen]
    p_value = float(stats.boschloo_exact(table).pvalue) if described.difference else 1.0
    return replace(described, p_value=p_value, over=SEEDS)


def _describe(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Returns the means of two methods' trainings, without any inference."""
    seed_counts = (len(first), len(second))
    return Comparison(
        first=float(first.mean()),
        second=float(second.mean()),
        difference=float(second.mean() - first.mean()),
        seeds=seed_counts,
        refused=describe_too_few_seeds(seed_counts),
    )


def describe_too_few_seeds(seed_counts: tuple[int, int]) -> str | None:
    """Returns the message that there are too few trainings for an interval; None if there are enough.

    Args:
        seed_counts: how many trainings there are of each method.
    """
    if min(seed_counts) >= MIN_SEEDS:
        return None
    first, second = seed_counts
    return (
        f"{first} and {second} training seeds are too few: to say whether a method is better, {MIN_SEEDS} of each are "
        "needed"
    )


def _seeds_spread(parts: Sequence[float], seed_counts: tuple[int, int]) -> float:
    """Returns the sum of the seeds' squared parts over their degrees of freedom.

    The degrees of freedom are at most those of two methods with as few seeds as the one with fewer. Satterthwaite's
    formula relies on the side with many seeds where that side varies more by chance. Without the limit of
    2 (fewest seeds - 1), 3 and 10 seeds of one setting were told apart in 6.3 % of the cases, with it in 4.1 %.

    Args:
        parts: the squared standard error of each method's mean over seeds.
        seed_counts: how many seeds each method has.
    """
    by_satterthwaite = sum(part**2 / (count - 1) for part, count in zip(parts, seed_counts, strict=True))
    by_fewest = sum(parts) ** 2 / (2 * (min(seed_counts) - 1))
    return max(by_satterthwaite, by_fewest)


def _explained(side: Benchmarks, clusters: Mapping[str, np.ndarray]) -> float:
    """Returns what residuals of questions and samples explain of a method's variance of seed means, over seeds."""
    seeds = len(next(iter(side.values())))
    return sum(
        float(squared_error(residuals(values), clusters.get(name)).sum()) / (seeds * (seeds - 1))
        for name, values in side.items()
    )


def _student(described: Comparison, over: str, question: float, seed: float, spread: float) -> Comparison:
    """Adds an interval and a p-value by Student's t.

    Args:
        described: the means, without any inference.
        over: what the interval is over, as `Comparison.over`.
        question, seed: the parts of the difference's squared standard error.
        spread: the sum of its squared parts over their degrees of freedom.
    """
    variance = question + seed
    if variance <= (ROUNDING * max(abs(described.first), abs(described.second))) ** 2:
        variance = 0.0
    if not variance and described.difference:
        # For instance 4 questions, all wrong before and all right after, which is no certainty.
        reason = "all seeds and questions differ by the same: nothing to take an error from"
        return replace(described, refused="; ".join(filter(None, [described.refused, reason])))
    half = 0.0
    p_value = 1.0
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
