"""Estimators over questions and samples.

Questions are the independent units: an estimator returns one value per question, ``[questions]`` float64 in [0, 1], and
confidence intervals are computed over questions, never over samples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas

QuestionValues = dict[str, np.ndarray]
"""Arrays ``[questions]`` by metric."""

PART = "reward/"
"""Prefix of the columns of scores that hold the reward function's output."""

CORRECT_PARTS = ("correct", "acc", "score")
"""Parts of a reward that may say whether a response is correct. The first that exists decides."""


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return unbiased pass@k per question: the chance that k of its n samples, drawn at random, include a correct one.

    With c correct samples this is 1 - C(n - c, k) / C(n, k), computed as a product, which does not overflow. See Chen
    et al., Evaluating Large Language Models Trained on Code, Eq. 1.

    Args:
        correct: ``[questions, n]`` bool.
        k: number of draws, 1 to n.
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
    picked = np.zeros(len(answers))
    for question, of_samples in enumerate(answers):
        # Counter keeps the order of first appearance, and most_common breaks ties in that order.
        votes = Counter(answer for answer in of_samples if answer is not None).most_common(1)
        if votes:
            picked[question] = correct[question][list(of_samples).index(votes[0][0])]
    return picked


def question_values(scores: pandas.DataFrame) -> QuestionValues:
    """Return every metric's value on every question.

    Args:
        scores: from `score_samples`: k rows per question, in order. A sample is correct if the first of `CORRECT_PARTS`
            that its reward has is at least 1.

    Returns:
        Arrays ``[questions]`` float64 by metric:
        `avg@k`, share of correct samples; `pass@j` and `best@j` for every power of two up to k; `maj@k`;
        `length`, mean tokens of a response; `truncated`, share of responses that reached the limit;
        `format`, share of responses whose part `format` is positive, if the reward has that part;
        `reward/<part>`, the mean of each part.
    """
    questions = scores["question"].nunique()
    k = len(scores) // questions

    def by_question(column: pandas.Series) -> np.ndarray:
        return column.to_numpy().reshape(questions, k)

    deciding = next(PART + part for part in CORRECT_PARTS if PART + part in scores)
    correct = by_question(scores[deciding] >= 1)
    answers = [[None if pandas.isna(one) else one for one in row] for row in by_question(scores["answer"])]
    powers_of_two = [1 << exponent for exponent in range(k.bit_length())]
    values = {f"avg@{k}": correct.mean(axis=1)}
    values |= {f"pass@{draws}": pass_at_k(correct, draws) for draws in powers_of_two}
    values |= {f"best@{draws}": best_at_k(correct, draws) for draws in powers_of_two}
    values[f"maj@{k}"] = majority_at_k(answers, correct)
    means = {column: scores[column] for column in ("length", "truncated")}
    if PART + "format" in scores:
        means["format"] = scores[PART + "format"] > 0
    means |= {column: scores[column] for column in scores if column.startswith(PART)}
    return values | {metric: by_question(column).mean(axis=1) for metric, column in means.items()}
