"""The chat prompt of a Countdown problem and the response that answers it."""

from collections.abc import Sequence


def build_prompt(numbers: Sequence[int], target: int) -> list[dict[str, str]]:
    """Return the chat messages of one problem, such as "2 3 5 = 16".

    A few characters only: it is made for a policy of about a million parameters that reads one digit at a time.

    Args:
        numbers: the given numbers, in the order to show.
        target: the value to reach.

    Returns:
        One user message: `[{"role": "user", "content": ...}]`.
    """
    return [{"role": "user", "content": f"{' '.join(map(str, numbers))} = {target}"}]


def build_response(expression: str) -> str:
    """Return the response that gives `expression` as the answer, in the form that the reward reads."""
    return f"<answer>{expression}</answer>"
