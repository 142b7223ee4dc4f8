r"""The last \boxed{…} of a text."""

from typing import Any

_COMMAND = "\\boxed"


def last_boxed(text: Any, max_length: int) -> str | None:
    r"""Return what stands in the last \boxed{…} of a text.

    Args:
        text: a response; anything but a string has no answer.
        max_length: longest content looked at, in characters: a bound on the work, whatever the text.

    Returns:
        The content between the braces; None if there is no \boxed, or the last one has no brace, is not closed, or is
        longer than `max_length`.
    """
    if not isinstance(text, str):
        return None
    start = text.rfind(_COMMAND)
    if start < 0:
        return None
    tail = text[start + len(_COMMAND) : start + len(_COMMAND) + max_length + 2]
    if not tail.startswith("{"):
        return None
    depth = 0
    escaped = False
    for index, character in enumerate(tail):
        # In LaTeX \{ and \} are characters, not groups.
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return tail[1:index]
    return None
