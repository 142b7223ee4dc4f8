"""Rewards of the sums task.

`compute_score` wants the sum and nothing else. `compute_score_of_last_answer` reads the last number of a response.

Early in a training a policy gains most by form: it stops explaining, and answers with a number alone. Both rewards also
return `format`, which measures only the form, and `skill`, which measures whether the policy can add, whatever the form
of its response.
"""

import re
from typing import Any

from verl_clipx.papers.responses import final_part

MAX_ANSWER_LENGTH = 256
"""In characters. What follows the thinking is not searched for numbers if it is longer, which bounds the work.

A sum has at most three digits, so there is room for some words around it.
"""

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response 1.0 if it is the sum and nothing else, else 0.0. No response raises an error.

    The thinking at the beginning of a response does not count.

    Args:
        solution_str: the response.
        ground_truth: the sum, as text.
        data_source, extra_info, kwargs: not used. verl passes them to every reward.

    Returns:
        `score` and `acc`: 1.0 if the response is the sum and nothing else.
        `format`: 1.0 if the response is a number and nothing else.
        `skill`: 1.0 if the last number in the response is right.
        All are 0.0 otherwise, and for a response that does not end its thinking or has more than MAX_ANSWER_LENGTH
        characters after it.
    """
    final = final_part(solution_str) if isinstance(solution_str, str) else None
    answer = "" if final is None else final.strip()
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
    """Score one response 1.0 if its last number is the sum, else 0.0. No response raises an error.

    A policy earns this reward from the start, before it has learnt the form that `compute_score` asks for. There may be
    words around the number, but not more than MAX_ANSWER_LENGTH characters after the thinking.

    Args:
        data_source, solution_str, ground_truth, extra_info, kwargs: as for `compute_score`.

    Returns:
        `score`, `acc` and `skill`: the `skill` of `compute_score`.
        `format`: as for `compute_score`.
    """
    scores = compute_score(data_source, solution_str, ground_truth)
    return {**scores, "score": scores["skill"], "acc": scores["skill"]}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Raise ValueError unless the ground truth is a text of ASCII digits.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    is_number = isinstance(ground_truth, str) and ground_truth.isascii() and ground_truth.isdecimal()
    if not is_number:
        raise ValueError(f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): sums need the sum as text")
