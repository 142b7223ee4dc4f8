"""The answer that a response gives, as a string by which responses can be grouped."""

import re

from verl_clipx.common.responses import final_part, last_boxed

MAX_ANSWER_LENGTH = 2000


def extract_answer(text: str) -> str | None:
    r"""Return a response's last answer: the content of its last `<answer>…</answer>`, else of its last `\boxed{…}`.

    As in the rewards, text before the last `</think>` or inside an unclosed `<think>` is ignored; otherwise truncated
    responses would vote. A box inside the tags is unwrapped. White space is removed, so that "1, 2" and "1,2" are the
    same vote. Nothing is evaluated: answers that are equal only mathematically are different votes.

    Returns:
        The answer, or None if it is missing, empty or longer than `MAX_ANSWER_LENGTH`.
    """
    text = final_part(text)
    if text is None:
        return None
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    tagged = text[start + len("<answer>") : end] if start >= 0 else None
    boxed = last_boxed(text if tagged is None else tagged, MAX_ANSWER_LENGTH)
    answer = boxed if boxed is not None else tagged
    if answer is None or len(answer) > MAX_ANSWER_LENGTH:
        return None
    return re.sub(r"\s+", "", answer) or None
