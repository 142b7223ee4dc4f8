"""Rewards of sums: the whole response must be the number, or the last number in it.

In the beginning a policy gains most by form: it stops explaining, and writes a bare number. `format` measures only
that; `skill` measures whether it can add, in whatever form it answers.
"""

import re
from typing import Any

from verl_clipx.papers.responses import final_part

# Right answers have at most three characters.
MAX_ANSWER_LENGTH = 256

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; never raises.

    Args:
        ground_truth: the sum, as text.

    Returns:
        `score` and `acc`: 1.0 if the response is the sum and nothing else; `format`: 1.0 if it is a number and nothing
        else; `skill`: 1.0 if the last number in it is right, whatever surrounds it.
    """
    text = final_part(solution_str) if isinstance(solution_str, str) else None
    answer = (text or "").strip()
    numbers = _NUMBER.findall(answer) if len(answer) <= MAX_ANSWER_LENGTH else []
    bare = numbers == [answer]
    skill = float(bool(numbers) and numbers[-1].removeprefix("+") == ground_truth)
    return {"score": bare * skill, "acc": bare * skill, "format": float(bare), "skill": skill}


def compute_score_of_last_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score the last number in a response: `score` and `acc` are `compute_score`'s `skill`, earned from the start."""
    parts = compute_score(data_source, solution_str, ground_truth)
    return parts | {"score": parts["skill"], "acc": parts["skill"]}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    if not isinstance(ground_truth, str) or not ground_truth.isdecimal():
        raise ValueError(f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): sums need the sum as text")
