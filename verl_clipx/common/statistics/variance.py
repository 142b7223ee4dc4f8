"""How much a mean over questions, seeds and samples varies, and how much of that each of the three causes."""

from dataclasses import asdict, dataclass

import numpy as np

CONFIDENCE = 0.95

MIN_CLUSTERS = 5
"""The fewest clusters that allow an error; docs/evaluation.md shows what remains of 95 % with few of them."""


def squared_error(values: np.ndarray, clusters: np.ndarray | None = None) -> np.ndarray:
    """Squared standard error of a mean over questions, which may come in clusters.

    sum over clusters of (sum of the deviations)^2 / questions^2, times n / (n - 1) with the effective number n
    of clusters, which makes it unbiased where questions are independent. With a question a cluster it is
    s^2 / questions. Miller, Adding Error Bars to Evals (arXiv 2411.00640), on clustered questions, without the factor.

    Args:
        values: ``[..., questions]`` float64; the result, ``[...]``, is NaN where there is only one cluster.
        clusters: ``[questions]`` a label for each question; None: each question is a cluster.
    """
    deviations = values - values.mean(axis=-1, keepdims=True)
    if clusters is not None:
        labels, codes = np.unique(clusters, return_inverse=True)
        deviations = deviations @ (codes[:, None] == np.arange(len(labels))).astype(np.float64)
    units = effective_units(values.shape[-1], clusters)
    factor = units / (units - 1) if units > 1 else np.nan
    return factor * (deviations**2).sum(axis=-1) / values.shape[-1] ** 2


def effective_units(questions: int, clusters: np.ndarray | None) -> float:
    """How many clusters of equal size say as much: questions^2 / sum of size^2 (Kish), one more than the freedom."""
    if clusters is None:
        return float(questions)
    return float(questions**2 / (np.unique(clusters, return_counts=True)[1] ** 2).sum())


def too_few_units(questions: int, clusters: np.ndarray | None) -> str | None:
    """Why these questions allow no interval; None if they do."""
    units = effective_units(questions, clusters)
    if clusters is not None and units < MIN_CLUSTERS:
        return f"clusters that count like {units:.1f} of equal size; an interval over clusters needs {MIN_CLUSTERS}"
    return f"{questions} question; an interval needs 2" if units < 2 else None


@dataclass(frozen=True)
class Split:
    """The variance of one sample's score, by where it comes from; None if the data cannot tell.

    Args:
        question: between questions, the mean over seeds: how their difficulty differs.
        seed: between trainings of one method, the mean over questions.
        interaction: between trainings on one question, beyond `seed`; if `sample` is None, with the samples' part.
        sample: between samples of one training on one question.
    """

    question: float
    seed: float | None
    interaction: float | None
    sample: float | None

    def of_mean(self, questions: int, seeds: int, samples: int) -> dict[str, float | None]:
        """What each part adds to the squared standard error of a mean over all three, samples of each of the others."""
        of_both = seeds * questions
        counts = (questions, seeds, of_both, of_both * (1 if self.sample is None else samples))
        parts = zip(asdict(self).items(), counts, strict=True)
        return {part: None if value is None else value / count for (part, value), count in parts}


def split_variance(values: np.ndarray, samples: int | None) -> Split:
    """Split the variance of 0/1 scores by the method of moments.

    Two-way analysis of variance, seeds x questions, both random, whose residual holds interaction and sampling; the
    latter is known from the shares themselves, since a score is 0 or 1: mean of p (1 - p) k / (k - 1). A part that
    comes out negative is 0. Searle, Casella, McCulloch, Variance Components.

    Args:
        values: ``[seeds, questions]`` shares of right samples; with one seed, `seed` and `interaction` are None.
        samples: behind each share (k); with 1 or None, `sample` is not known.

    Raises:
        ValueError: there is only one question.
    """
    seeds, questions = values.shape
    if questions < 2:
        raise ValueError("the variance between questions needs at least 2 questions")
    sample = None
    if samples is not None and samples > 1:
        sample = float((values * (1 - values)).mean() * samples / (samples - 1))
    of_question = values.mean(axis=0).var(ddof=1)
    if seeds == 1:
        return Split(max(0.0, float(of_question - (sample or 0.0) / (samples or 1))), None, None, sample)
    residual = float((residuals(values) ** 2).sum() / ((seeds - 1) * (questions - 1)))
    return Split(
        question=max(0.0, float(of_question - residual / seeds)),
        seed=max(0.0, float(values.mean(axis=1).var(ddof=1) - residual / questions)),
        interaction=max(0.0, residual - (sample or 0.0) / (samples or 1)),
        sample=sample,
    )


def residuals(values: np.ndarray) -> np.ndarray:
    """What remains of ``[seeds, questions]`` without the means of its rows and columns."""
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
