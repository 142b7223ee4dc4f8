r"""Finds the final answer of a response: the last `\boxed{…}` after the thinking, if it was closed.

The text comes from a policy under training. It is only scanned, with bounded depth: it is never executed, and nothing
in it can raise an error.
"""

import re
from collections import deque
from dataclasses import dataclass

from verl_clipx.common.responses import BOX, BOXED, braced, final_part

# The longest answer among the papers' data sets has about 300 characters.
MAX_ANSWER_LENGTH = 2000

# A response with more boxes than this counts as inconsistent.
MAX_BOXES = 64


@dataclass(frozen=True)
class Extraction:
    """A response's answer.

    Attributes:
        answer: content of the last box, stripped; None if that box is missing, empty or not closed.
        finished: False if the thinking or the last box was opened and not closed.
        consistent: whether all boxes of the final part contain the same text.
    """

    answer: str | None
    finished: bool
    consistent: bool


def extract_answer(response: str) -> Extraction:
    """Read the last box of the final part (see `final_part`)."""
    final = final_part(response)
    if final is None:
        return Extraction(None, finished=False, consistent=False)
    boxes = deque(BOX.finditer(final), maxlen=MAX_BOXES + 1)
    if not boxes:
        # A name without a brace is a mention, unless the response was cut off there.
        return Extraction(None, finished=not final.rstrip().endswith(BOXED), consistent=False)
    last = _content(final, boxes[-1])
    if last is None:
        return Extraction(None, finished=False, consistent=False)
    if not last:
        return Extraction(None, finished=True, consistent=False)
    consistent = len(boxes) <= MAX_BOXES and all(_content(final, box) == last for box in boxes)
    return Extraction(last, finished=True, consistent=consistent)


def _content(text: str, opening: re.Match[str]) -> str | None:
    """Return the stripped content of a box, or None if no brace closes it in time."""
    content = braced(text, opening.end(), MAX_ANSWER_LENGTH)
    return None if content is None else content.strip()
