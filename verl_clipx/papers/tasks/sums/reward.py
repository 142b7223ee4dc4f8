"""Rewards of the sums task: `compute_score` wants the sum and nothing else, the other one reads the last number.

Early in a training a policy gains most by form: it stops explaining, and answers with a number alone. Of the values
that both rewards return, `format` measures only that; `skill` measures whether the policy can add, in whatever form it
answers.
"""

import re
from typing import Any

from verl_clipx.papers.responses import final_part

# Longer responses are not searched for numbers, which bounds the work. Sums have at most three digits, so that this
# leaves room for some words around one.
MAX_ANSWER_LENGTH = 256

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)


# verl passes every argument to every reward; these two need neither `data_source` nor `extra_info`.
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; never raises.

    Args:
        ground_truth: the sum, as text.

    Returns:
        `score` and `acc`: 1.0 if the response is the sum and nothing else; `format`: 1.0 if it is a number and nothing
        else; `skill`: 1.0 if the last number in it is right, whatever surrounds it. All are 0.0 for a response that
        does not end its thinking, or is longer than MAX_ANSWER_LENGTH.
    """
    text = final_part(solution_str) if isinstance(solution_str, str) else None
    answer = (text or "").strip()
    numbers = []
    if len(answer) <= MAX_ANSWER_LENGTH:
        numbers = _NUMBER.findall(answer)
    is_number_alone = numbers == [answer]
    last_is_right = bool(numbers) and numbers[-1].removeprefix("+") == ground_truth
    accuracy = float(is_number_alone and last_is_right)
    return {
        "score": accuracy,
        "acc": accuracy,
        "format": float(is_number_alone),
        "skill": float(last_is_right),
    }


def compute_score_of_last_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score the last number in one response, whatever surrounds it; never raises.

    A policy earns this reward from the start, before it has learnt the form that `compute_score` asks for.

    Returns:
        `score`, `acc` and `skill`: 1.0 if the last number is right; `format`: as for `compute_score`.
    """
    scores = compute_score(data_source, solution_str, ground_truth)
    return {**scores, "score": scores["skill"], "acc": scores["skill"]}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    if not isinstance(ground_truth, str) or not ground_truth.isdecimal():
        raise ValueError(f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): sums need the sum as text")
