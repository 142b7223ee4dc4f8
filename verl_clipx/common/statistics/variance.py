"""The error of a mean over questions, which may come in clusters."""

import numpy as np

CONFIDENCE = 0.95
"""The confidence level of every interval."""

MIN_CLUSTERS = 5
"""The fewest clusters that allow an error; docs/evaluation.md shows what remains of 95 % with few of them."""


def compute_squared_error(values: np.ndarray, clusters: np.ndarray | None = None) -> np.ndarray:
    """Return the squared standard error of a mean over questions, which may come in clusters.

    It is the sum over clusters of (the sum of the cluster's deviations from the mean)^2, divided by questions^2 and
    multiplied by n / (n - 1), where n is the effective number of clusters. This factor makes it unbiased if questions
    are independent. If each question is a cluster, the result is s^2 / questions.
    Source: Miller, Adding Error Bars to Evals (arXiv 2411.00640), on clustered questions, without the factor.

    Args:
        values: the values of the questions, (…, questions), float64.
        clusters: a label for each question, (questions,). None: each question is a cluster.

    Returns:
        The squared errors, (…); NaN if there is only one cluster.
    """
    questions = values.shape[-1]
    deviations = values - values.mean(axis=-1, keepdims=True)
    if clusters is not None:
        labels, label_indices = np.unique(clusters, return_inverse=True)
        is_in_cluster = label_indices[:, None] == np.arange(len(labels))
        # The sum of the deviations in each cluster, (…, clusters).
        deviations = deviations @ is_in_cluster.astype(np.float64)
    units = count_effective_units(questions, clusters)
    factor = units / (units - 1) if units > 1 else np.nan
    return factor * (deviations**2).sum(axis=-1) / questions**2


def count_effective_units(questions: int, clusters: np.ndarray | None) -> float:
    """Return how many clusters of equal size say as much as these: questions^2 / sum of size^2 (Kish).

    It is one more than the degrees of freedom of the mean.

    Args:
        questions: how many questions there are.
        clusters: as for `compute_squared_error`.
    """
    if clusters is None:
        return float(questions)
    _, sizes = np.unique(clusters, return_counts=True)
    return float(questions**2 / (sizes**2).sum())


def explain_missing_interval(questions: int, clusters: np.ndarray | None) -> str | None:
    """Return why there are too few questions or clusters for an interval, as a clause; None if there are enough.

    Args:
        questions: how many questions there are, at least 1.
        clusters: as for `compute_squared_error`.
    """
    if clusters is None:
        if questions < 2:
            return "1 question is too few; an interval needs 2"
        return None
    units = count_effective_units(questions, clusters)
    if units < MIN_CLUSTERS:
        return f"the clusters count like {units:.1f} of equal size; an interval over clusters needs {MIN_CLUSTERS}"
    return None


def remove_row_and_column_means(values: np.ndarray) -> np.ndarray:
    """Return the residuals of values, (seeds, questions): what is left without the means of rows and of columns."""
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
