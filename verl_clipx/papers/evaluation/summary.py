"""Reduces completions and their scores to one value per question and metric."""

import numpy as np
import pandas

from verl_clipx.papers.evaluation.estimators import best_at_k, majority_at_k, pass_at_k
from verl_clipx.papers.evaluation.scores import PART

CORRECT_PARTS = ("correct", "acc", "score")
"""Parts of a reward that may say whether a response is correct. The first that exists is the default."""


def is_correct(scores: pandas.DataFrame, part: str | None, threshold: float) -> pandas.Series:
    """Return whether each completion is correct.

    Args:
        part: part of the reward that decides; None for the first of `CORRECT_PARTS` that exists.
        threshold: smallest value of a correct response.
    """
    parts = [column.removeprefix(PART) for column in scores if column.startswith(PART)]
    chosen = part if part is not None else next(name for name in CORRECT_PARTS if name in parts)
    if chosen not in parts:
        raise ValueError(f"--correct {part}: the reward does not return this part, but only {', '.join(parts)}")
    return scores[PART + chosen] >= threshold


def question_values(
    scores: pandas.DataFrame, *, correct_part: str | None = None, correct_from: float = 1.0
) -> dict[str, np.ndarray]:
    """Return every metric's value on every question.

    Args:
        scores: from `score_samples`: k rows per question, in order.
        correct_part, correct_from: see `is_correct`.

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

    correct = by_question(is_correct(scores, correct_part, correct_from))
    answers = [[None if pandas.isna(one) else one for one in row] for row in by_question(scores["answer"])]
    powers_of_two = [1 << exponent for exponent in range(k.bit_length())]
    values = {f"avg@{k}": correct.mean(axis=1)}
    values |= {f"pass@{draws}": pass_at_k(correct, draws) for draws in powers_of_two}
    values |= {f"best@{draws}": best_at_k(correct, draws) for draws in powers_of_two}
    values[f"maj@{k}"] = majority_at_k(answers, correct)
    values["length"] = by_question(scores["length"]).mean(axis=1)
    values["truncated"] = by_question(scores["truncated"]).mean(axis=1)
    if PART + "format" in scores:
        values["format"] = by_question(scores[PART + "format"] > 0).mean(axis=1)
    values |= {column: by_question(scores[column]).mean(axis=1) for column in scores if column.startswith(PART)}
    return values
