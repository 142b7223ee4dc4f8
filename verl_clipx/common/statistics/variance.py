"""How much a mean over questions varies, which may come in clusters, and what is left beside rows and columns."""

import numpy as np

CONFIDENCE = 0.95

MIN_CLUSTERS = 5
"""The fewest clusters that allow an error; docs/evaluation.md shows what remains of 95 % with few of them."""


def squared_error(values: np.ndarray, clusters: np.ndarray | None = None) -> np.ndarray:
    """Returns the squared standard error of a mean over questions, which may come in clusters.

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
    """Returns how many equal clusters say as much, one more than the freedom: questions^2 / sum of size^2 (Kish)."""
    if clusters is None:
        return float(questions)
    return float(questions**2 / (np.unique(clusters, return_counts=True)[1] ** 2).sum())


def too_few_units(questions: int, clusters: np.ndarray | None) -> str | None:
    """Says why these questions allow no interval; None if they do."""
    units = effective_units(questions, clusters)
    if clusters is not None and units < MIN_CLUSTERS:
        return f"clusters that count like {units:.1f} of equal size; an interval over clusters needs {MIN_CLUSTERS}"
    return f"{questions} question; an interval needs 2" if units < 2 else None


def residuals(values: np.ndarray) -> np.ndarray:
    """Returns what remains of ``[seeds, questions]`` without the means of its rows and columns."""
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
