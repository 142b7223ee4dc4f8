"""Finds the answer in a response: after the thinking, in answer tags or in a LaTeX group."""

import re
from collections import deque
from typing import Any

THINK = "<think>"
END_OF_THINK = "</think>"
ANSWER = "<answer>"
END_OF_ANSWER = "</answer>"
BOXED = "\\boxed"

# A box opens with a brace; without one, its name is only mentioned.
BOX = re.compile(r"\\boxed\s{0,8}\{")


def final_part(response: str) -> str | None:
    """Return what follows the last `</think>`.

    A response without these tags is its own final part: templates that end with `<think>` leave the opening tag in the
    prompt, where it cannot be seen, so only an opening tag in the response proves that the thinking was never closed.
    """
    end = response.rfind(END_OF_THINK)
    if response.rfind(THINK) > end:
        return None
    return response if end < 0 else response[end + len(END_OF_THINK) :]


def tagged_answer(response: Any, max_length: int) -> str | None:
    """Return the content of the last `<answer>…</answer>` after a response's thinking; None if none is there.

    Args:
        response: anything but a string has no answer.
        max_length: in characters; a longer answer is none.
    """
    text = final_part(response) if isinstance(response, str) else None
    if text is None:
        return None
    end = text.rfind(END_OF_ANSWER)
    start = text.rfind(ANSWER, 0, max(end, 0))
    if start < 0 or end - start - len(ANSWER) > max_length:
        return None
    return text[start + len(ANSWER) : end]


def read_braces(text: str, start: int, max_length: int) -> str | None:
    r"""Return the content of a LaTeX group, in which \{ and \} are characters.

    Args:
        start: where the content begins, behind the opening brace.
        max_length: in characters: a bound on the work, whatever the text. None is returned for a longer group, and for
            one that is not closed.
    """
    depth = 1
    escaped = False
    for position in range(start, min(len(text), start + max_length + 1)):
        character = text[position]
        if escaped or character == "\\":
            escaped = not escaped
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
    return None


def find_last_boxed(text: Any, max_length: int) -> str | None:
    r"""Return what stands in the last \boxed{…} of a response; None if there is no box, or as `read_braces` says."""
    boxes = deque(BOX.finditer(text), maxlen=1) if isinstance(text, str) else None
    return read_braces(text, boxes[0].end(), max_length) if boxes else None
