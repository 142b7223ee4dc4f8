"""Whether one method is better than another: one inference over training seeds and questions together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.estimate import MIN_SEEDS, ROUNDING
from verl_clipx.common.statistics.variance import (
    CONFIDENCE,
    compute_squared_error,
    count_effective_units,
    explain_missing_interval,
    remove_row_and_column_means,
)

LEVEL = 0.05
"""A p-value below this level is a claim; of several, it is the p-value adjusted by Holm's method.

docs/evaluation.md counts the false claims."""

HIGHER = "higher than that of"
LOWER = "lower than that of"
ALIKE = "not told apart from that of"
"""The verdicts on the second method against the first."""

SEEDS_AND_QUESTIONS = "seeds and questions"
SEEDS = "seeds"
QUESTIONS = "questions"

Benchmarks = Mapping[str, np.ndarray]
"""From a benchmark to the values of a method on it, (seeds, questions), float64.

What is compared is the sum over benchmarks of the mean over questions. To compare a weighted mean of benchmarks,
multiply the values by its weights before."""


@dataclass(frozen=True)
class Comparison:
    """Difference of two methods or checkpoints, second minus first.

    Args:
        first, second: the number of each method that is compared, such as a mean score.
        difference: the second minus the first.
        seeds: how many trainings there are of each method.
        low, high: the ends of the 95 % interval of the difference; None if there is no interval.
        p_value: the two-sided p-value; None if there is none.
        over: what the interval and the p-value are over: `SEEDS_AND_QUESTIONS` and `SEEDS` speak of the methods,
            `QUESTIONS` only of these two checkpoints. None if there is no p-value.
        error: the squared standard error of the difference by its parts, "question" and "seed".
        wins, losses, ties: on how many questions the second is better, worse, or equal.
        refused: why there is no interval or p-value that speaks of the methods; None if there is one.
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
        """Returns whether there is a p-value that speaks of the methods, not only of two checkpoints."""
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
    """Return a family of comparisons with p-values adjusted by Holm's method, in the same order.

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
    """Return the p-values of one family, adjusted by Holm's method, in the same order.

    If adjusted p-values below 5 % are taken for discoveries, at most 5 % of families have a false one. In ascending
    order, the i-th of n p-values, counted from 0, is multiplied by n - i. Then each is raised to the one before it if
    that is larger, and lowered to 1 if it is above 1.
    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: a p-value in [0, 1] for each comparison. None stands for a comparison that does not belong to the
            family: it is not counted, and stays None.
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
    seeds. That part is subtracted, since the variance over questions contains it already. If this leaves nothing for
    the seeds, only the questions' part remains.

    The interval is Student's with Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946). They are limited
    if one method has fewer seeds than the other: see `_divide_seed_parts`.

    Args:
        first, second: the values of each method, see `Benchmarks`; the same questions in the same order.
        clusters: from a benchmark to a label for each question, (questions,), if some of its questions share a source.

    Returns:
        A comparison over seeds and questions. If there is one training of each method, it is over questions, and speaks
        only of these two trainings. Otherwise, with fewer than `MIN_SEEDS` trainings of a method, or with too few
        questions or clusters, it has no interval.

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
    means = replace(
        _compare_without_inference(first_means, second_means),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )
    too_few = []
    for name, values in by_question.items():
        reason = explain_missing_interval(len(values), clusters.get(name))
        if reason:
            too_few.append(f"{name}: {reason}")
    if too_few or (means.refused and seed_counts != (1, 1)):
        return replace(means, refused=_join_reasons(means.refused, *too_few))
    question_part = 0.0
    # The sum of the squared parts, each over its degrees of freedom.
    squares_over_freedom = 0.0
    for name, values in by_question.items():
        part = float(compute_squared_error(values, clusters.get(name)))
        question_part += part
        squares_over_freedom += part**2 / (count_effective_units(len(values), clusters.get(name)) - 1)
    if seed_counts == (1, 1):
        return _add_interval(
            means,
            over=QUESTIONS,
            question_part=question_part,
            seed_part=0.0,
            squares_over_freedom=squares_over_freedom,
        )
    errors_of_means = [_squared_error_of_mean(first_means), _squared_error_of_mean(second_means)]
    explained = _compute_explained_error(first, clusters) + _compute_explained_error(second, clusters)
    seed_part = max(0.0, sum(errors_of_means) - explained)
    if seed_part:
        squares_over_freedom += _divide_seed_parts(errors_of_means, seed_counts)
    return _add_interval(
        means,
        over=SEEDS_AND_QUESTIONS,
        question_part=question_part,
        seed_part=seed_part,
        squares_over_freedom=squares_over_freedom,
    )


def _join_reasons(*reasons: str | None) -> str:
    """Return the reasons for a refusal in one text; a reason that is None is left out."""
    return "; ".join(reason for reason in reasons if reason is not None)


def _check_shapes(name: str, first: np.ndarray, second: np.ndarray) -> None:
    """Raise ValueError unless both methods have values on the same number of questions of a benchmark."""
    have_same_questions = first.ndim == 2 and second.ndim == 2 and first.shape[1] == second.shape[1]
    if not have_same_questions or not first.size or not second.size:
        raise ValueError(f"{name}: both need [seeds, questions] values, got shapes {first.shape} and {second.shape}")


def _squared_error_of_mean(values: np.ndarray) -> float:
    """Return the squared standard error of the mean of independent values, (values,)."""
    return float(values.var(ddof=1) / len(values))


def compare_means(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two methods by one number of each training, with Welch's interval over seeds.

    It is meant for numbers without questions, such as a validation's accuracy in a log. If there are questions behind
    the numbers, they are taken as given.

    Args:
        first, second: a number for each training of the method, (trainings,).

    Returns:
        The comparison. With fewer than `MIN_SEEDS` trainings of a method, it has neither an interval nor a p-value.

    Raises:
        ValueError: a method has no number.
    """
    first = np.asarray(first, dtype=np.float64)
    second = np.asarray(second, dtype=np.float64)
    means = _compare_without_inference(first, second)
    if means.refused:
        return means
    errors_of_means = [_squared_error_of_mean(first), _squared_error_of_mean(second)]
    return _add_interval(
        means,
        over=SEEDS,
        question_part=0.0,
        seed_part=sum(errors_of_means),
        squares_over_freedom=_divide_seed_parts(errors_of_means, means.seeds),
    )


def compare_shares(first: Sequence[bool], second: Sequence[bool]) -> Comparison:
    """Compare two methods by the share of their trainings to which something happened, such as a collapse.

    The p-value is that of Boschloo's exact test (Statistica Neerlandica 24, 1970). Its rate of false claims is at most
    5 % for any number of seeds, and it detects more differences than Fisher's exact test: 3 of 3 against 0 of 3 has p
    0.031. There is no interval of the difference. `estimate.estimate_share` gives the interval of each method's share.

    Args:
        first, second: whether it happened, for each training of the method, (trainings,).

    Returns:
        The comparison. With fewer than `MIN_SEEDS` trainings of a method, it has no p-value.

    Raises:
        ValueError: a method has no training.
    """
    first = np.asarray(first, dtype=bool)
    second = np.asarray(second, dtype=bool)
    shares = _compare_without_inference(first.astype(np.float64), second.astype(np.float64))
    if shares.refused:
        return shares
    happened = [int(first.sum()), int(second.sum())]
    did_not_happen = [int((~first).sum()), int((~second).sum())]
    # Equal shares need no test.
    p_value = 1.0
    if shares.difference:
        # scipy's test takes a table with a column for each method.
        p_value = float(stats.boschloo_exact([happened, did_not_happen]).pvalue)
    return replace(shares, p_value=p_value, over=SEEDS)


def _compare_without_inference(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Compare the means of two methods' trainings, without an interval or a p-value.

    Args:
        first, second: a number for each training of the method, (trainings,).

    Returns:
        The comparison. Its `refused` says so if there are too few trainings for an interval.

    Raises:
        ValueError: a method has no number.
    """
    if not (len(first) and len(second)):
        raise ValueError("a number of at least one training is needed of both methods")
    seed_counts = (len(first), len(second))
    return Comparison(
        first=float(first.mean()),
        second=float(second.mean()),
        difference=float(second.mean() - first.mean()),
        seeds=seed_counts,
        refused=describe_too_few_seeds(seed_counts),
    )


def describe_too_few_seeds(seed_counts: tuple[int, int]) -> str | None:
    """Return the message that there are too few trainings for an interval; None if there are enough.

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


def _divide_seed_parts(parts: Sequence[float], seed_counts: tuple[int, int]) -> float:
    """Return the sum of the methods' squared parts of the error, each over its degrees of freedom.

    The degrees of freedom are at most 2 (n - 1), where n is the smaller number of seeds. Satterthwaite's formula gives
    most weight to the side with many seeds if that side happens to vary more. Without the limit, 3 and 10 seeds of the
    same setting were told apart in 6.3 % of the cases, with it in 4.1 %.

    Args:
        parts: the squared standard error of each method's mean over seeds.
        seed_counts: how many seeds each method has.
    """
    by_satterthwaite = sum(part**2 / (count - 1) for part, count in zip(parts, seed_counts, strict=True))
    by_fewest = sum(parts) ** 2 / (2 * (min(seed_counts) - 1))
    return max(by_satterthwaite, by_fewest)


def _compute_explained_error(values_of_method: Benchmarks, clusters: Mapping[str, np.ndarray]) -> float:
    """Return the part of a method's squared error over seeds that questions and samples explain.

    It is the variance of the method's seed means that the residuals of questions and samples predict, divided by the
    number of seeds.
    """
    seeds = len(next(iter(values_of_method.values())))
    explained = 0.0
    for name, values in values_of_method.items():
        squared_errors = compute_squared_error(remove_row_and_column_means(values), clusters.get(name))
        explained += float(squared_errors.sum()) / (seeds * (seeds - 1))
    return explained


def _add_interval(
    means: Comparison, *, over: str, question_part: float, seed_part: float, squares_over_freedom: float
) -> Comparison:
    """Return a comparison with an interval and a p-value by Student's t.

    Args:
        means: the comparison without an interval and a p-value.
        over: what the interval is over, as in `Comparison.over`.
        question_part, seed_part: the parts of the difference's squared standard error.
        squares_over_freedom: the sum of the squared parts, each over its degrees of freedom.
    """
    variance = question_part + seed_part
    if variance <= (ROUNDING * max(abs(means.first), abs(means.second))) ** 2:
        variance = 0.0
    if not variance and means.difference:
        # For instance, 4 questions may all be wrong before and all right after, which is no certainty.
        reason = "all seeds and questions differ by the same: nothing to take an error from"
        return replace(means, refused=_join_reasons(means.refused, reason))
    half_width = 0.0
    p_value = 1.0
    if variance:
        freedom = variance**2 / squares_over_freedom
        half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance))
        p_value = float(2 * stats.t.sf(abs(means.difference) / np.sqrt(variance), freedom))
    return replace(
        means,
        low=means.difference - half_width,
        high=means.difference + half_width,
        p_value=p_value,
        over=over,
        error={"question": question_part, "seed": seed_part},
    )
