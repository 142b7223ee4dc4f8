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
    """Score the form and the answer of one response. No response raises an error, and any thread may call it.

    Source: Logic-RL's reward as AR-Lopti uses it. The form scores +1 if it is right and -1 if not. The answer scores +2
    if it is right, -1.5 if it is wrong, and -2 if none can be read. In a wrong form no answer counts, so the possible
    totals are 3, -0.5, -1 and -3.

    Args:
        solution_str: the decoded response, or prompt and response.
        ground_truth: a line per person, such as "(1) Zoey is a knight", or a mapping with this text as
            `solution_text_format`, as in the released files. With anything else no answer is right.
        think_in_prompt: whether the prompt ends with `<think>`; None accepts responses to either kind of prompt.
        data_source, extra_info, kwargs: not used. verl passes them to every reward.

    Returns:
        `score`: the total.
        `acc`: 1.0 if the total is 3, else 0.0. The papers call it accuracy.
        `format`: 1.0 if each of the four tags occurs exactly once, in order.
        `parsed`: 1.0 if the form is right and the answer names the kind of each person.
    """
    text = _complete_response(solution_str, think_in_prompt) if isinstance(solution_str, str) else ""
    tag_positions = [text.find(tag) for tag in TAGS]
    has_right_form = all(text.count(tag) == 1 for tag in TAGS) and tag_positions == sorted(tag_positions)
    truth = _parse_truth(ground_truth)
    answer = None
    if has_right_form:
        _, _, opening, closing = tag_positions
        answer = _parse_answer(text[opening + len("<answer>") : closing], truth)
    is_right = answer is not None and answer == truth
    score_of_form = FORMAT_RIGHT if has_right_form else FORMAT_WRONG
    if answer is None:
        score_of_answer = ANSWER_MISSING
    elif is_right:
        score_of_answer = ANSWER_RIGHT
    else:
        score_of_answer = ANSWER_WRONG
    return {
        "score": score_of_form + score_of_answer,
        "acc": float(is_right),
        "format": float(has_right_form),
        "parsed": float(answer is not None),
    }


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Raise ValueError for a ground truth that names nobody's kind.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    if not _parse_truth(ground_truth):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): knights and knaves need a line "
            'per person, "(1) Zoey is a knight", or a mapping with that as `solution_text_format`'
        )


def _complete_response(text: str, think_in_prompt: bool | None) -> str:
    """Return a response without its prompt, or with a `<think>` in front if its prompt ended with one.

    The module's docstring has the rules.

    Args:
        text: the response, or prompt and response.
        think_in_prompt: as for `compute_score`.
    """
    if text.lstrip().startswith(PROMPT_OPENINGS):
        markers = [(text.find(marker), marker) for marker in ASSISTANT_MARKERS if marker in text]
        if markers:
            position, marker = min(markers)
            return text[position + len(marker) :]
    if think_in_prompt is None:
        think_in_prompt = "<think>" not in text
    return f"<think>{text}" if think_in_prompt else text


def _parse_answer(text: str, truth: Mapping[str, str]) -> dict[str, str] | None:
    """Return the kind that an answer gives each person of the truth, by the person's name in small letters.

    Returns:
        None if the truth names nobody, if the answer is longer than `MAX_ANSWER_LENGTH`, or if it lacks somebody's
        kind. Also None if "knight" and "knave" do not occur exactly as often as there are people; they count within
        words, too. An answer that names both kinds of a person therefore does not count.
    """
    if not truth or len(text) > MAX_ANSWER_LENGTH:
        return None
    kind_word_count = len(_KIND_WORD.findall(text))
    if kind_word_count != len(truth):
        return None
    claimed = {name.lower(): kind.lower() for name, kind in _KIND.findall(text)}
    if claimed.keys() != truth.keys():
        return None
    return claimed


def _parse_truth(ground_truth: Any) -> dict[str, str]:
    """Return each person's kind by name, both in small letters; empty for a ground truth that cannot be used."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("solution_text_format")
    if not isinstance(ground_truth, str) or len(ground_truth) > MAX_ANSWER_LENGTH:
        return {}
    return {name.lower(): kind.lower() for name, kind in _KIND.findall(ground_truth)}
