"""What a response says after its thinking; only that can hold its answer."""

THINK, END_OF_THINK = "<think>", "</think>"


def final_part(response: str) -> str | None:
    """Return what follows the last `</think>`.

    A response without these tags is its own final part: templates that end with `<think>` leave the opening tag in the
    prompt, where it cannot be seen, so only an opening tag in the response proves that the thinking was never closed.

    Returns:
        The final part; None if the response ends inside a `<think>` that it opened.
    """
    end = response.rfind(END_OF_THINK)
    if response.rfind(THINK) > end:
        return None
    return response if end < 0 else response[end + len(END_OF_THINK) :]
