r"""Rule reward of HiTab: 1 if the last \boxed{…} after the thinking gives the expected answers, else 0.

ACPO's reward on HiTab is accuracy, but neither its paper nor its repository says how an answer is read. The box and the
comparison (answers.py) are this project's choice.
"""

from collections.abc import Mapping
from typing import Any

from verl_clipx.papers.responses import final_part, find_last_boxed
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth
from verl_clipx.papers.tasks.hitab.answers import MAX_ANSWER_LENGTH, answers_match

MAX_EXPECTED = 100
"""The most expected answers that a ground truth may have. The release has at most ten."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    r"""Score one response 1.0 if its answer is right, else 0.0.

    No response raises an error, and any thread may call this.

    Args:
        solution_str: the response.
        ground_truth: a mapping `{"answers": strings, "ratio": bool, "rounding": bool}` (see `answers_match`), or its
            JSON. With anything else, no answer is right.
        data_source, extra_info, kwargs: not used. verl passes them to every reward.

    Returns:
        `score` and `acc`: the reward.
        `format`: 1.0 if the last box is closed and not empty, else 0.0.
    """
    final = final_part(solution_str) if isinstance(solution_str, str) else None
    answer = find_last_boxed(final, MAX_ANSWER_LENGTH)
    if answer is None or not answer.strip():
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    correct = False
    ground_truth = decode_ground_truth(ground_truth)
    if isinstance(ground_truth, Mapping):
        correct = answers_match(
            answer,
            _strings(ground_truth.get("answers")),
            ratio=bool(ground_truth.get("ratio")),
            rounding=bool(ground_truth.get("rounding")),
        )
    return {"score": float(correct), "acc": float(correct), "format": 1.0}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Raise ValueError for a ground truth without expected answers.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    decoded = decode_ground_truth(ground_truth)
    if not isinstance(decoded, Mapping) or not _strings(decoded.get("answers")):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): HiTab needs "
            '{"answers": texts, "ratio": bool, "rounding": bool}, as a mapping or as JSON'
        )


def _strings(answers: Any) -> list[str]:
    """Return the expected answers of a ground truth; empty if they are not at most MAX_EXPECTED strings.

    Args:
        answers: a list or, from Parquet, an array. It may be anything.
    """
    if isinstance(answers, str):
        return []
    try:
        if len(answers) > MAX_EXPECTED:
            return []
        answers = list(answers)
    except TypeError:
        return []
    return answers if all(isinstance(answer, str) for answer in answers) else []
