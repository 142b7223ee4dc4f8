r"""The last \boxed{…} of a text."""

from typing import Any

from verl_clipx.common.responses import braced

_COMMAND = "\\boxed"


def last_boxed(text: Any, max_length: int) -> str | None:
    r"""Return what stands in the last \boxed{…} of a text.

    Args:
        text: a response; anything but a string has no answer.
        max_length: longest content looked at, in characters.

    Returns:
        The content between the braces; None if there is no \boxed, or the last one has no brace, is not closed, or is
        longer than `max_length`.
    """
    if not isinstance(text, str):
        return None
    start = text.rfind(_COMMAND)
    if start < 0:
        return None
    opening = start + len(_COMMAND)
    return braced(text, opening + 1, max_length) if text.startswith("{", opening) else None
