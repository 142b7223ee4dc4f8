"""Logic-RL's rule reward for knights and knaves: the form of the response, then the kind of each person.

verl loads this file by path (`reward.custom_reward_function.path`, name `compute_score`), so it imports the standard
library only. The text comes from a policy under training, so it must never raise an error, be executed, or cost more
than a scan.

The released reward reads prompt and response together, and the prompt ends in `<think>`. verl 0.9.1 passes only
the response. This reward reads a text as follows:

- it starts like a prompt (`PROMPT_OPENINGS`) and has an assistant marker: what follows the first marker counts, as in
  the release, and must hold all four tags;
- otherwise it is a response. If `<think>` is not in it, the prompt must have opened it, and one is put in front. If it
  is, the policy has written it itself, and nothing is added.

`think_in_prompt` (`reward.custom_reward_function.reward_kwargs.think_in_prompt`) settles the last question where the
chat template is known: true always puts one in front, so that a second `<think>` breaks the form as in the release;
false never does, so that the policy must write it.
"""

import re
from collections.abc import Mapping
from typing import Any

FORMAT_RIGHT, FORMAT_WRONG = 1.0, -1.0
ANSWER_RIGHT, ANSWER_WRONG, ANSWER_MISSING = 2.0, -1.5, -2.0

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# What the chat and base prompts of Logic-RL start with, and what separates them from the response.
PROMPT_OPENINGS = ("<|im_start|>", "The user asks a question", "User:", "Assistant:")
ASSISTANT_MARKERS = ("<|im_start|>assistant", "Assistant:")

# Eight people take about 200 characters. The cap bounds the work, whatever the policy writes.
MAX_ANSWER_LENGTH = 8192

# ASCII for the two words only: the Kelvin sign is no k, but names may have any letters.
_KIND = re.compile(r"\b(\w+)\s+is\s+a\s+((?a:knight|knave))\b", re.IGNORECASE)
_KIND_WORD = re.compile(r"knight|knave", re.IGNORECASE | re.ASCII)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    think_in_prompt: bool | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response; never raises and holds no state, so any thread may call it.

    Source: Logic-RL's reward as AR-Lopti uses it; +1 for the form or -1, and +2 for the right answer, -1.5 for a
    wrong one, -2 for none that can be read. In a wrong form no answer counts, so the totals are 3, -0.5, -1, -3.

    Args:
        solution_str: the decoded response, or prompt and response.
        ground_truth: one line a person, "(1) Zoey is a knight"; or a mapping with that as `solution_text_format`, as
            in the released files. Of anything else no answer is right.
        think_in_prompt: whether the prompt ends in `<think>`; None accepts responses to either kind of prompt.

    Returns:
        `score`: the total. `acc`: 1.0 if the total is 3, else 0.0, which is what the papers call accuracy. `format`:
        1.0 if each of the four tags stands exactly once, in order. `parsed`: 1.0 if the form is right and the answer
        names the kind of each person.
    """
    text = _from_think_on(solution_str, think_in_prompt)
    if text is None or not has_right_format(text):
        return _result(FORMAT_WRONG + ANSWER_MISSING, right_format=False, parsed=False)
    start = text.find("<answer>") + len("<answer>")
    truth = _parse_truth(ground_truth)
    answer = parse_answer(text[start : text.find("</answer>")], truth)
    if answer is None:
        return _result(FORMAT_RIGHT + ANSWER_MISSING, right_format=True, parsed=False)
    answer_score = ANSWER_RIGHT if answer == truth else ANSWER_WRONG
    return _result(FORMAT_RIGHT + answer_score, right_format=True, parsed=True)


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """As `verl_clipx.tasks.reward.check_ground_truth`; all rows have one form, whatever their data source."""
    if not _parse_truth(ground_truth):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): knights and knaves need a line a person, "
            '"(1) Zoey is a knight", or a mapping with that as `solution_text_format`'
        )


def has_right_format(text: str) -> bool:
    """Return whether each of the four tags stands in a text exactly once, in order; anything may stand around them."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    positions = [text.find(tag) for tag in TAGS]
    return positions == sorted(positions)


def parse_answer(text: str, names: Mapping[str, str]) -> dict[str, str] | None:
    """Read the kind of each person out of an answer.

    Args:
        text: what stands between the answer tags.
        names: its keys are the names to look for, in lower case.

    Returns:
        The kind of each name, "knight" or "knave"; None if one is missing, or if the words knight and knave do not
        stand there exactly as often as there are names: who says both says nothing.
    """
    if not names or len(text) > MAX_ANSWER_LENGTH or len(_KIND_WORD.findall(text)) != len(names):
        return None
    found: dict[str, str] = {}
    for name, kind in _KIND.findall(text):
        found.setdefault(name.lower(), kind.lower())
    return {name: found[name] for name in names} if names.keys() <= found.keys() else None


def _result(score: float, *, right_format: bool, parsed: bool) -> dict[str, float]:
    right = score == FORMAT_RIGHT + ANSWER_RIGHT
    return {"score": score, "acc": float(right), "format": float(right_format), "parsed": float(parsed)}


def _from_think_on(text: Any, think_in_prompt: bool | None) -> str | None:
    if not isinstance(text, str):
        return None
    if text.lstrip().startswith(PROMPT_OPENINGS):
        places = [(text.find(marker), marker) for marker in ASSISTANT_MARKERS if marker in text]
        if places:
            start, marker = min(places)
            return text[start + len(marker) :]
    opened = think_in_prompt if think_in_prompt is not None else "<think>" not in text
    return f"<think>{text}" if opened else text


def _parse_truth(ground_truth: Any) -> dict[str, str]:
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("solution_text_format")
    if not isinstance(ground_truth, str) or len(ground_truth) > MAX_ANSWER_LENGTH:
        return {}
    return {name.lower(): kind.lower() for name, kind in _KIND.findall(ground_truth)}
