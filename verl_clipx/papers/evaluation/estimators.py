"""Estimates accuracy over questions and samples.

Questions are the independent units: an estimator returns one value per question, ``[questions]`` float64 in [0, 1], and
confidence intervals are computed over questions, never over samples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas

QuestionValues = dict[str, np.ndarray]
"""Arrays ``[questions]`` by metric."""

PART_PREFIX = "reward/"
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

    Raises:
        ValueError: k is not from 1 to n.
    """
    correct = np.asarray(correct, dtype=bool)
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: pass@k needs 1 <= k <= {samples}, the number of samples for each question")
    correct_count = correct.sum(axis=1)
    # The chance that all k draws are wrong: draw i = 0 … k - 1 picks one of n - c - i wrong samples among n - i.
    draws_before = np.arange(k)
    wrong_left = np.clip(samples - correct_count[:, None] - draws_before, 0, None)
    chance_of_wrong = wrong_left / (samples - draws_before)
    return 1.0 - chance_of_wrong.prod(axis=1)


def best_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return best@k per question: the chance that k draws with replacement from its n samples include a correct one.

    With c correct samples this is 1 - (1 - c / n)^k. verl's validation estimates it as `best@k/mean` from 1,000 random
    draws. At k = n it is up to 0.37 lower than pass@k, because draws repeat samples. Its expectation depends on n; that
    of pass@k does not.

    Args:
        correct: ``[questions, n]`` bool.
        k: number of draws, at least 1.
    """
    return 1.0 - (1.0 - np.mean(correct, axis=1)) ** k


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> np.ndarray:
    """Return maj@k per question: whether the sample picked by a majority vote over the answers is correct.

    The vote picks the first sample with the most frequent answer. Ties go to the answer that was given first. The
    samples are drawn independently, so their order favours no answer.

    Args:
        answers: the answers of each question's k samples; a sample without an answer (None) does not vote.
        correct: ``[questions, k]`` bool.

    Returns:
        ``[questions]`` float64, 1.0 or 0.0; 0.0 for a question without any answer.
    """
    is_correct = np.zeros(len(answers))
    for question, sample_answers in enumerate(answers):
        # Counter keeps the order of first appearance, and most_common breaks ties in that order.
        votes = Counter(answer for answer in sample_answers if answer is not None)
        if not votes:
            continue
        ((winner, _),) = votes.most_common(1)
        picked_sample = list(sample_answers).index(winner)
        is_correct[question] = correct[question][picked_sample]
    return is_correct


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
        """Return a column as ``[questions, k]``."""
        return column.to_numpy().reshape(questions, k)

    # Every reward has the part `score`, so one of them exists.
    deciding_part = next(PART_PREFIX + part for part in CORRECT_PARTS if PART_PREFIX + part in scores)
    correct = by_question(scores[deciding_part] >= 1)
    answers = []
    for row in by_question(scores["answer"]):
        answers.append([None if pandas.isna(answer) else answer for answer in row])
    powers_of_two = [1 << exponent for exponent in range(k.bit_length())]
    values = {f"avg@{k}": correct.mean(axis=1)}
    for draws in powers_of_two:
        values[f"pass@{draws}"] = pass_at_k(correct, draws)
    for draws in powers_of_two:
        values[f"best@{draws}"] = best_at_k(correct, draws)
    values[f"maj@{k}"] = majority_at_k(answers, correct)
    values["length"] = by_question(scores["length"]).mean(axis=1)
    values["truncated"] = by_question(scores["truncated"]).mean(axis=1)
    if PART_PREFIX + "format" in scores:
        values["format"] = by_question(scores[PART_PREFIX + "format"] > 0).mean(axis=1)
    for column in scores:
        if column.startswith(PART_PREFIX):
            values[column] = by_question(scores[column]).mean(axis=1)
    return values
