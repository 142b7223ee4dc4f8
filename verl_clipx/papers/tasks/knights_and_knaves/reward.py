"""Logic-RL's rule reward for knights and knaves, which judges the form of a response and then each person's kind.

verl loads this file by path (`reward.custom_reward_function.path`, name `compute_score`), so it imports only the
standard library. Responses come from a policy under training: they must never raise an error, be executed, or cost more
than a scan.

The released reward reads prompt and response together, and the prompt ends with `<think>`. verl 0.9.1 passes only the
response. This reward reads a text as follows:

- If the text starts like a prompt (`PROMPT_OPENINGS`) and contains an assistant marker, what follows the first marker
  counts, as in the release, and must contain all four tags.
- Otherwise the text is a response. If it does not contain `<think>`, the prompt must have ended with it, and one is put
  in front. If it does, the policy has written the tag itself, and nothing is added.

If the chat template is known, `think_in_prompt` (`reward.custom_reward_function.reward_kwargs.think_in_prompt`) decides
this instead. If true, a `<think>` is always put in front, so that a second one breaks the form, as in the release. If
false, none is, so that the policy must write it.
"""

import re
from collections.abc import Mapping
from typing import Any

FORMAT_RIGHT = 1.0
FORMAT_WRONG = -1.0
ANSWER_RIGHT = 2.0
ANSWER_WRONG = -1.5
ANSWER_MISSING = -2.0

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# What the chat and base prompts of Logic-RL start with, and what separates them from the response.
PROMPT_OPENINGS = ("<|im_start|>", "The user asks a question", "User:", "Assistant:")
ASSISTANT_MARKERS = ("<|im_start|>assistant", "Assistant:")

# An answer about eight people has about 200 characters. The limit bounds the work, whatever the policy writes.
MAX_ANSWER_LENGTH = 8192

# Only the two words are restricted to ASCII: the Kelvin sign is not a k, but names may contain any letters.
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
    """Score one response; never raises and has no state, so any thread may call it.

    Source: Logic-RL's reward as AR-Lopti uses it. The form scores +1 if it is right and -1 if not. The answer scores +2
    if it is right, -1.5 if it is wrong, and -2 if none can be read. In a wrong form no answer counts, so the possible
    totals are 3, -0.5, -1 and -3.

    Args:
        solution_str: the decoded response, or prompt and response.
        ground_truth: a line per person, such as "(1) Zoey is a knight", or a mapping with this text as
            `solution_text_format`, as in the released files. With anything else no answer is right.
        think_in_prompt: whether the prompt ends with `<think>`; None accepts responses to either kind of prompt.

    Returns:
        `score`: the total. `acc`: 1.0 if the total is 3, else 0.0, which the papers call accuracy. `format`: 1.0 if
        each of the four tags occurs exactly once, in order. `parsed`: 1.0 if the form is right and the answer names the
        kind of each person.
    """
    text = _from_think_on(solution_str, think_in_prompt) if isinstance(solution_str, str) else ""
    places = [text.find(tag) for tag in TAGS]
    right_format = all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    truth = _parse_truth(ground_truth)
    answer = _parse_answer(text[places[2] + len(TAGS[2]) : places[3]], truth) if right_format else None
    of_answer = ANSWER_MISSING if answer is None else ANSWER_RIGHT if answer == truth else ANSWER_WRONG
    return {
        "score": (FORMAT_RIGHT if right_format else FORMAT_WRONG) + of_answer,
        "acc": float(answer is not None and answer == truth),
        "format": float(right_format),
        "parsed": float(answer is not None),
    }


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    if not _parse_truth(ground_truth):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): knights and knaves need a line "
            'per person, "(1) Zoey is a knight", or a mapping with that as `solution_text_format`'
        )


def _from_think_on(text: str, think_in_prompt: bool | None) -> str:
    if text.lstrip().startswith(PROMPT_OPENINGS):
        places = [(text.find(marker), marker) for marker in ASSISTANT_MARKERS if marker in text]
        if places:
            start, marker = min(places)
            return text[start + len(marker) :]
    opened = think_in_prompt if think_in_prompt is not None else "<think>" not in text
    return f"<think>{text}" if opened else text


def _parse_answer(text: str, truth: Mapping[str, str]) -> dict[str, str] | None:
    """Return the kind that an answer gives each person of the truth.

    None if somebody is missing, or if the words "knight" and "knave" do not occur exactly as often as there are people,
    so that naming both kinds of a person does not count.
    """
    if not truth or len(text) > MAX_ANSWER_LENGTH or len(_KIND_WORD.findall(text)) != len(truth):
        return None
    # The first mention of a name counts.
    claimed = {name.lower(): kind.lower() for name, kind in reversed(_KIND.findall(text))}
    return {name: claimed[name] for name in truth} if truth.keys() <= claimed.keys() else None


def _parse_truth(ground_truth: Any) -> dict[str, str]:
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("solution_text_format")
    if not isinstance(ground_truth, str) or len(ground_truth) > MAX_ANSWER_LENGTH:
        return {}
    return {name.lower(): kind.lower() for name, kind in _KIND.findall(ground_truth)}
