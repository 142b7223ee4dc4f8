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
    """Return what follows the last `</think>`; the whole response if it has no thinking.

    If a chat template ends with `<think>`, the response may have only the closing tag.

    Returns:
        None if the response opens its thinking, and does not close it again.
    """
    end = response.rfind(END_OF_THINK)
    if response.rfind(THINK) > end:
        return None
    if end < 0:
        return response
    return response[end + len(END_OF_THINK) :]


def tagged_answer(response: Any, max_length: int) -> str | None:
    """Return the content of the last `<answer>…</answer>` after a response's thinking. It contains neither tag.

    Args:
        response: the response. Anything but a string has no answer.
        max_length: the largest number of characters of an answer.

    Returns:
        None if there is no such answer, or if it is longer than `max_length`.
    """
    text = final_part(response) if isinstance(response, str) else None
    if text is None:
        return None
    last_end = text.rfind(END_OF_ANSWER)
    if last_end < 0:
        return None
    # The last opening tag that is followed by a closing one.
    opening = text.rfind(ANSWER, 0, last_end)
    if opening < 0:
        return None
    start = opening + len(ANSWER)
    # The first closing tag after it. More may follow.
    end = text.find(END_OF_ANSWER, start)
    if end - start > max_length:
        return None
    return text[start:end]


def read_braces(text: str, start: int, max_length: int) -> str | None:
    r"""Return the content of a LaTeX group, in which \{ and \} are ordinary characters.

    Args:
        start: the index at which the content begins, behind the opening brace.
        max_length: the largest number of characters of the content, which bounds the work.

    Returns:
        None if the group is not closed, or if its content is longer than `max_length`.
    """
    # The number of groups that are open.
    depth = 1
    is_escaped = False
    for position in range(start, min(len(text), start + max_length + 1)):
        character = text[position]
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
    return None


def find_last_boxed(text: Any, max_length: int) -> str | None:
    r"""Return the content of the last \boxed{…} of a text.

    Args:
        text: the text. Anything but a string has no box.
        max_length: the largest number of characters of the content.

    Returns:
        None if there is no box, or if the last one is not closed or longer than `max_length`.
    """
    if not isinstance(text, str):
        return None
    # A deque of this length keeps only the last match.
    last_boxes = deque(BOX.finditer(text), maxlen=1)
    if not last_boxes:
        return None
    return read_braces(text, last_boxes[0].end(), max_length)
