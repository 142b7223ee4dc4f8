"""Estimators over questions and samples.

Questions are the independent units: an estimator gives one value a question, and intervals are taken over questions,
never over samples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def average_at_k(correct: np.ndarray) -> np.ndarray:
    """avg@k of every question: the share of its k samples that are right.

    Args:
        correct: ``[questions, k]`` bool, or values such as rewards.

    Returns:
        ``[questions]`` float64.
    """
    return np.asarray(correct, dtype=np.float64).mean(axis=1)


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of every question: the chance that k of its n samples, drawn at random, hold a right one.

    1 - C(n - c, k) / C(n, k) with c right samples, as a product, which does not overflow. Chen et al., Evaluating
    Large Language Models Trained on Code, Eq. 1.

    Args:
        correct: ``[questions, n]`` bool.
        k: number of draws, 1 to n.

    Returns:
        ``[questions]`` float64 in [0, 1].

    Raises:
        ValueError: k is outside 1 to n.
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

    Returns:
        ``[questions]`` float64 in [0, 1].

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"k={k}: best@k needs at least one draw")
    return 1.0 - (1.0 - average_at_k(correct)) ** k


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, … up to `largest`."""
    return [1 << exponent for exponent in range(largest.bit_length())]


def majority_choice(answers: Sequence[str | None]) -> int | None:
    """Index of the sample that a majority vote over the answers picks.

    It is the first sample with the most frequent answer. Of answers with equally many votes the one given first wins:
    a rule that looks at nothing but the order of the samples, which are exchangeable.

    Args:
        answers: the samples' answers; a sample without one (None) has no vote.

    Returns:
        The index, or None if no sample has an answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return None
    # Counter keeps the order of first appearance, and max returns the first of equals.
    return list(answers).index(max(votes, key=votes.__getitem__))


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> np.ndarray:
    """maj@k of every question: whether the sample that the majority picks is right.

    Args:
        answers: for every question its k samples' answers.
        correct: ``[questions, k]`` bool.

    Returns:
        ``[questions]`` float64, 0 where no sample has an answer.
    """
    chosen = [majority_choice(row) for row in answers]
    return np.array([0.0 if index is None else float(correct[row, index]) for row, index in enumerate(chosen)])
