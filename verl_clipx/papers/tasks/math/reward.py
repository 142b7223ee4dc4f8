r"""Rewards of mathematics with a boxed answer: 1 or 0; a strict one, +1 or -1; a conservative one for evaluation.

They are for verl's `reward.custom_reward_function`, and any thread may call them. Responses come from a policy under
training: they are never executed, raise no error, and cost no more than a fixed limit of time and memory.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from verl_clipx.papers.responses import BOX, BOXED, final_part, read_braces
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth, spell_answer
from verl_clipx.papers.tasks.math.equality import equal_answers, is_equivalent

MAX_ALTERNATIVES = 16  # more accepted spellings than any data set has; Minerva has up to 3
MAX_ANSWER_LENGTH = 2000  # characters; the longest right answer among the papers' data sets has about 300
MAX_BOXES = 64  # a response with more boxes counts as inconsistent


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response 1.0 if its last `\boxed{…}` is right, else 0.0, as in ACPO's and AR-Lopti's runs.

    Args:
        ground_truth: the right answer as text or number, or a list of accepted ones, or the JSON of a list of texts.
        extra_info: a mapping. If its `truncated` is true, the response was cut off, and scores 0.

    Returns:
        score, acc and format, as `verl_clipx.papers.tasks.reward` says; truncated, 1.0 if the response ends inside its
        thinking or its box, or `extra_info` says that it was cut off; undecided, 1.0 if there is no verdict (see
        `is_equivalent`), which counts as wrong.
    """
    return _judge(solution_str, ground_truth, extra_info, is_equivalent)


def compute_score_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response +1.0 if format and answer are right, else -1.0, as in DGPO's runs; see `compute_score`.

    The format is right if the final part has a closed box that is not empty, and no box with another content, so that
    guessing several answers never pays.
    """
    parts = _judge(solution_str, ground_truth, extra_info, is_equivalent, one_answer=True)
    return parts | {"score": 1.0 if parts["acc"] else -1.0}


def compute_score_for_evaluation(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response 1.0 if its last box is right beyond reasonable doubt (`equal_answers`); see `compute_score`.

    `clipx papers eval` uses this by default, because a reported number should not depend on a lenient comparison.
    """
    return _judge(solution_str, ground_truth, extra_info, equal_answers)


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    if not accepted_answers(ground_truth):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): mathematics needs the right answer as "
            "text or number, or a list of accepted ones"
        )


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the accepted spellings of a ground truth (see `compute_score`), at most MAX_ALTERNATIVES."""
    # Other texts that are valid JSON are answers: "[1, 2]" is an interval, and "7" is 7.
    if isinstance(ground_truth, str) and ground_truth.startswith('["'):
        ground_truth = decode_ground_truth(ground_truth)
    ground_truth = getattr(ground_truth, "tolist", lambda: ground_truth)()
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [text for text in map(spell_answer, alternatives[:MAX_ALTERNATIVES]) if text]


def extract_answers(response: Any) -> tuple[list[str | None], bool]:
    r"""Return the contents of the boxes after the thinking, and whether neither the thinking nor the last box is open.

    None stands for a box that no brace closes within MAX_ANSWER_LENGTH. Of many boxes, the last MAX_BOXES + 1 count.
    """
    final = final_part(response) if isinstance(response, str) else ""
    if final is None:
        return [], False
    boxes = deque(BOX.finditer(final), maxlen=MAX_BOXES + 1)
    contents = [read_braces(final, box.end(), MAX_ANSWER_LENGTH) for box in boxes]
    answers = [content and content.strip() for content in contents]
    # A name without a brace is a mention, unless the response was cut off there.
    finished = answers[-1] is not None if answers else not final.rstrip().endswith(BOXED)
    return answers, finished


def _judge(
    response: Any, ground_truth: Any, extra_info: Any, equal: Callable[..., bool | None], one_answer: bool = False
) -> dict[str, float]:
    answers, finished = extract_answers(response)
    cut_off = isinstance(extra_info, Mapping) and extra_info.get("truncated") in (True, 1)
    consistent = not one_answer or (len(answers) <= MAX_BOXES and len(set(answers)) == 1)
    formatted = bool(answers and answers[-1]) and consistent and not cut_off
    verdict = equal(answers[-1], *accepted_answers(ground_truth)) if formatted else False
    return {
        "score": float(verdict is True),
        "acc": float(verdict is True),
        "format": float(formatted),
        "truncated": float(cut_off or not finished),
        "undecided": float(verdict is None),
    }
