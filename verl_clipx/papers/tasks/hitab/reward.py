r"""Rule reward of HiTab: 1 if the last \boxed{…} after the thinking gives the expected answers, else 0.

ACPO's reward on HiTab is accuracy, but neither its paper nor its repository says how an answer is read. The box and the
comparison (answers.py) are this project's choice.
"""

from collections.abc import Mapping
from typing import Any

from verl_clipx.papers.responses import final_part, find_last_boxed
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth
from verl_clipx.papers.tasks.hitab.answers import MAX_ANSWER_LENGTH, answers_match

MAX_EXPECTED = 100  # expected answers; the release has at most ten


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    r"""Score one response; never raises and has no state, so any thread may call it.

    Args:
        ground_truth: a mapping `{"answers": strings, "ratio": bool, "rounding": bool}` (see `answers_match`), or its
            JSON; with anything else no answer is right.

    Returns:
        `score` and `acc`, the reward, 1.0 or 0.0; `format`, 1.0 if the last box is closed and not empty.
    """
    answer = find_last_boxed(final_part(solution_str), MAX_ANSWER_LENGTH) if isinstance(solution_str, str) else None
    if answer is None or not answer.strip():
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    correct = False
    ground_truth = decode_ground_truth(ground_truth)
    if isinstance(ground_truth, Mapping):
        expected = _strings(ground_truth.get("answers"))
        ratio, rounding = (bool(ground_truth.get(key)) for key in ("ratio", "rounding"))
        correct = answers_match(answer, expected, ratio=ratio, rounding=rounding)
    return {"score": float(correct), "acc": float(correct), "format": 1.0}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    decoded = decode_ground_truth(ground_truth)
    if not isinstance(decoded, Mapping) or not _strings(decoded.get("answers")):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): HiTab needs "
            '{"answers": texts, "ratio": bool, "rounding": bool}, as a mapping or as JSON'
        )


def _strings(answers: Any) -> list[str]:
    # Parquet gives a list or an array.
    try:
        answers = list(answers) if len(answers) <= MAX_EXPECTED and not isinstance(answers, str) else []
    except TypeError:
        return []
    return answers if all(isinstance(answer, str) for answer in answers) else []
