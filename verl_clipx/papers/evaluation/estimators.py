"""Estimators over questions and samples.

Questions are the independent units: an estimator returns one value per question, ``[questions]`` float64 in [0, 1], and
confidence intervals are computed over questions, never over samples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return unbiased pass@k per question: the chance that k of its n samples, drawn at random, include a correct one.

    With c correct samples this is 1 - C(n - c, k) / C(n, k), computed as a product, which does not overflow. See Chen
    et al., Evaluating Large Language Models Trained on Code, Eq. 1.

    Args:
        correct: ``[questions, n]`` bool.
    """
    correct = np.asarray(correct, dtype=bool)
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: pass@k needs 1 <= k <= {samples}, the number of samples for each question")
    right = correct.sum(axis=1)
    # The chance that all k draws are wrong: draw i = 0 … k - 1 picks one of n - c - i wrong samples among n - i.
    drawn = np.arange(k)
    all_wrong = np.clip(samples - right[:, None] - drawn, 0, None) / (samples - drawn)
    return 1.0 - all_wrong.prod(axis=1)


def best_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return best@k per question: the chance that k draws with replacement from its n samples include a correct one.

    With c correct samples this is 1 - (1 - c / n)^k, which verl's validation estimates as `best@k/mean` from 1,000
    random draws. At k = n it is up to 0.37 lower than pass@k, since draws repeat samples.

    Args:
        correct: ``[questions, n]`` bool.
        k: number of draws, at least 1.
    """
    return 1.0 - (1.0 - np.mean(correct, axis=1)) ** k


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> np.ndarray:
    """Return maj@k per question: whether the sample picked by a majority vote over the answers is correct.

    The vote picks the first sample with the most frequent answer. Ties go to the answer that was given first, a rule
    that depends only on the order of the samples, which are exchangeable.

    Args:
        answers: the answers of each question's k samples; a sample without an answer (None) does not vote.
        correct: ``[questions, k]`` bool.
    """
    found = np.zeros(len(answers))
    for question, of_samples in enumerate(answers):
        # Counter keeps the order of first appearance, and most_common breaks ties in that order.
        votes = Counter(answer for answer in of_samples if answer is not None).most_common(1)
        if votes:
            found[question] = correct[question][list(of_samples).index(votes[0][0])]
    return found
