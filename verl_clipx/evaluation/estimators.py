"""Estimators over questions and samples.

Questions are the independent units: an estimator gives one value a question, ``[questions]`` float64 in [0, 1], and
intervals are taken over questions, never over samples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of every question: the chance that k of its n samples, drawn at random, hold a right one.

    1 - C(n - c, k) / C(n, k) with c right samples, as a product, which does not overflow. Chen et al., Evaluating
    Large Language Models Trained on Code, Eq. 1.

    Args:
        correct: ``[questions, n]`` bool.
    """
    correct = np.asarray(correct, dtype=bool)
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: pass@k needs 1 <= k <= {samples}, the number of samples for each question")
    right = correct.sum(axis=1)
    # All k draws are wrong: for i = 0 … k - 1 the draw comes from n - c - i wrong ones among n - i.
    drawn = np.arange(k)
    all_wrong = np.clip(samples - right[:, None] - drawn, 0, None) / (samples - drawn)
    return 1.0 - all_wrong.prod(axis=1)


def best_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """best@k of every question: the chance that k draws with replacement from its n samples hold a right one.

    1 - (1 - c / n)^k with c right samples: what verl's validation estimates as `best@k/mean` by 1,000 random draws.
    At k = n it lies below pass@k by up to 0.37, since draws repeat samples.

    Args:
        correct: ``[questions, n]`` bool.
        k: number of draws, at least 1.
    """
    return 1.0 - (1.0 - np.mean(correct, axis=1)) ** k


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> np.ndarray:
    """maj@k of every question: whether the sample that a majority vote over the answers picks is right.

    Picked is the first sample with the most frequent answer. Of answers with equally many votes the one given first
    wins: a rule that looks at nothing but the order of the samples, which are exchangeable.

    Args:
        answers: for every question its k samples' answers; a sample without one (None) has no vote.
        correct: ``[questions, k]`` bool.
    """
    found = np.zeros(len(answers))
    for question, of_samples in enumerate(answers):
        # Counter keeps the order of first appearance, and most_common puts the first of equals first.
        votes = Counter(answer for answer in of_samples if answer is not None).most_common(1)
        if votes:
            found[question] = correct[question][list(of_samples).index(votes[0][0])]
    return found
