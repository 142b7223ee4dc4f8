r"""Rewards of mathematics with an answer in `\boxed{…}`.

`compute_score` gives 1 or 0, and `compute_score_strict`, which minds the format, +1 or -1. `clipx papers eval` uses
`compute_score_for_evaluation`, which compares more conservatively.

They are for verl's `reward.custom_reward_function`, and any thread may call them. Responses come from a policy under
training: they are never executed, raise no error, and cost no more than a fixed limit of time and memory.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from verl_clipx.papers.responses import BOX, BOXED, final_part, read_braces
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth, spell_answer
from verl_clipx.papers.tasks.math.equality import equal_answers, is_equivalent

MAX_ALTERNATIVES = 16
"""Accepted answers that count. It is more than any data set has; Minerva has up to 3."""

MAX_ANSWER_LENGTH = 2000
"""In characters. The longest right answer among the papers' data sets has about 300."""

MAX_BOXES = 64
"""The most boxes that a response may have in the format of `compute_score_strict`."""

# The beginning of a list of texts in JSON. No answer begins like that.
_LIST_OF_TEXTS = re.compile(r'\s*\[\s*"')


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response 1.0 if its last `\boxed{…}` is right, else 0.0, as in ACPO's and AR-Lopti's runs.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the right answer as text or number; a list of accepted ones; or a list of accepted texts as JSON.
        extra_info: if it is a mapping whose `truncated` is true, the response was cut off, and scores 0.

    Returns:
        `score`, `acc` and `format`: see `verl_clipx.papers.tasks.reward.compute_score`.
        `truncated`: 1.0 if the response does not end its thinking or its last box, if this box is longer than
        MAX_ANSWER_LENGTH, or if `extra_info` says that the response was cut off.
        `undecided`: 1.0 if no verdict was reached on the answer (see `is_equivalent`). It counts as wrong then.
    """
    return _score(solution_str, ground_truth, extra_info, is_equivalent)


def compute_score_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response +1.0 if format and answer are right, else -1.0, as in DGPO's runs.

    The format is right if there is a box after the thinking, the last one is closed and not empty, and all boxes, at
    most MAX_BOXES, have the same content, so that guessing several answers never pays.

    Args:
        data_source, solution_str, ground_truth, extra_info: as for `compute_score`.

    Returns:
        The same parts as `compute_score`.
    """
    scores = _score(solution_str, ground_truth, extra_info, is_equivalent, wants_one_answer=True)
    return {**scores, "score": 1.0 if scores["acc"] else -1.0}


def compute_score_for_evaluation(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""Score one response 1.0 if its last box is right beyond reasonable doubt (see `equal_answers`), else 0.0.

    `clipx papers eval` uses this by default, because a reported number should not depend on a lenient comparison.

    Args:
        data_source, solution_str, ground_truth, extra_info: as for `compute_score`.

    Returns:
        The same parts as `compute_score`.
    """
    return _score(solution_str, ground_truth, extra_info, equal_answers)


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Raise ValueError if a ground truth has no accepted answer.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    if not accepted_answers(ground_truth):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): mathematics needs the right answer as "
            "text or number, or a list of accepted ones"
        )


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the accepted spellings of a ground truth (see `compute_score`), at most MAX_ALTERNATIVES."""
    # Other texts that are valid JSON are answers: "[1, 2]" is an interval, and "7" is 7.
    if isinstance(ground_truth, str) and _LIST_OF_TEXTS.match(ground_truth):
        ground_truth = decode_ground_truth(ground_truth)
    # A Parquet file's lists come as arrays of numpy.
    if hasattr(ground_truth, "tolist"):
        ground_truth = ground_truth.tolist()
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    spellings = [spell_answer(alternative) for alternative in alternatives[:MAX_ALTERNATIVES]]
    # None, and whatever else is no answer, has an empty spelling.
    return [spelling for spelling in spellings if spelling]


class Extraction(NamedTuple):
    """The answers in a response.

    Args:
        answers: the contents of the boxes after the thinking, in their order; None for a box that no brace closes
            within MAX_ANSWER_LENGTH characters. Of more than MAX_BOXES boxes, only the last MAX_BOXES + 1 are here.
        finished: whether the response ends its thinking, and the last of its boxes within MAX_ANSWER_LENGTH characters.
    """

    answers: list[str | None]
    finished: bool


def extract_answers(response: Any) -> Extraction:
    """Return the answers in a response. Anything but a text is taken for an empty response."""
    final_text = final_part(response) if isinstance(response, str) else ""
    if final_text is None:
        # The response ends inside its thinking.
        return Extraction(answers=[], finished=False)
    # One box more than MAX_BOXES shows that there are too many. The others are left out, which bounds the work.
    openings = deque(BOX.finditer(final_text), maxlen=MAX_BOXES + 1)
    answers = []
    for opening in openings:
        content = read_braces(final_text, opening.end(), MAX_ANSWER_LENGTH)
        answers.append(None if content is None else content.strip())
    if answers:
        return Extraction(answers=answers, finished=answers[-1] is not None)
    # A response may mention the command without a brace. At its very end, however, the brace was cut off.
    ends_in_box = final_text.rstrip().endswith(BOXED)
    return Extraction(answers=[], finished=not ends_in_box)


def _score(
    response: Any,
    ground_truth: Any,
    extra_info: Any,
    is_equal: Callable[..., bool | None],
    *,
    wants_one_answer: bool = False,
) -> dict[str, float]:
    """Score a response as `compute_score` describes it.

    Args:
        is_equal: `is_equivalent` or `equal_answers`. It compares an answer with the accepted ones, and returns None if
            it reaches no verdict.
        wants_one_answer: whether the format asks that all boxes have the same content.
    """
    answers, finished = extract_answers(response)
    # The flag may also be numpy's True, which equals Python's. Any other value, such as a list, means nothing.
    was_cut_off = isinstance(extra_info, Mapping) and extra_info.get("truncated") in (True, 1)
    has_format = bool(answers) and bool(answers[-1]) and not was_cut_off
    if wants_one_answer and not _have_one_content(answers):
        has_format = False
    verdict: bool | None = False
    if has_format:
        verdict = is_equal(answers[-1], *accepted_answers(ground_truth))
    accuracy = float(verdict is True)
    return {
        "score": accuracy,
        "acc": accuracy,
        "format": float(has_format),
        "truncated": float(was_cut_off or not finished),
        "undecided": float(verdict is None),
    }


def _have_one_content(answers: list[str | None]) -> bool:
    """Return whether there is at least one box, there are at most MAX_BOXES, and all have the same content."""
    return len(answers) <= MAX_BOXES and len(set(answers)) == 1
