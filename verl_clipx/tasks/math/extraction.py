r"""Finds the final answer of a response: the last `\boxed{…}` after the thinking, if it was closed.

The text comes from a policy under training. It is only scanned, with bounded depth: it is never executed, and nothing
in it can raise an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl_clipx.common.responses import braced, final_part

# The longest answer among the papers' data sets has about 300 characters.
MAX_ANSWER_LENGTH = 2000

# A response with more boxes than this counts as inconsistent.
MAX_BOXES = 64

_BOX = re.compile(r"\\boxed\s{0,8}\{")


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
    start = final.rfind("\\boxed")
    if start < 0:
        return Extraction(None, finished=True, consistent=False)
    last = _content(final, start)
    if last is None:
        return Extraction(None, finished=False, consistent=False)
    if not last:
        return Extraction(None, finished=True, consistent=False)
    return Extraction(last, finished=True, consistent=all(content == last for content in _contents(final)))


def _contents(text: str) -> Iterator[str | None]:
    position = 0
    for _ in range(MAX_BOXES):
        position = text.find("\\boxed", position)
        if position < 0:
            return
        yield _content(text, position)
        position += 1
    if text.find("\\boxed", position) >= 0:
        yield None


def _content(text: str, start: int) -> str | None:
    """Return the stripped content of the box that starts at `start`, or None if no brace closes it in time."""
    opening = _BOX.match(text, start)
    if opening is None:
        return None
    content = braced(text, opening.end(), MAX_ANSWER_LENGTH)
    return None if content is None else content.strip()
