r"""Countdown's rule reward for prompts that ask for \boxed{…} instead of `<answer>…</answer>`."""

from typing import Any

from verl_clipx.common.responses import final_part, last_boxed
from verl_clipx.papers.tasks.countdown.reward import (
    MAX_ANSWER_LENGTH,
    check_ground_truth,
    parse_expression,
    score_expression,
)

__all__ = ["check_ground_truth", "compute_score"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    r"""Score one response by the expression in the last \boxed{…} after its thinking; never raises and has no state.

    The rule is that of ACPO's boxed variant: LaTeX operators such as \times do not count.

    Args:
        ground_truth: a mapping `{"numbers": integers, "target": number}`, or its JSON; with anything else no answer is
            right.

    Returns:
        `score` and `acc`, the reward, 1.0 or 0.0; `format`, 1.0 if the last box contains an arithmetic expression.
    """
    answer = last_boxed(final_part(solution_str), MAX_ANSWER_LENGTH) if isinstance(solution_str, str) else None
    return score_expression(None if answer is None else parse_expression(answer), ground_truth)
