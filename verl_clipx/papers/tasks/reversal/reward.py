"""Rule reward of reversal: how much of the last `<answer>` is the text backwards.

Responses come from a policy under training: they must never raise an error or cost more than a scan.
"""

from typing import Any

from verl_clipx.papers.responses import tagged_answer

MAX_ANSWER_LENGTH = 256
"""In characters. Answers have about fifty. Longer ones are not compared."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response by how much of its answer is right. No response raises an error, and any thread may call it.

    Args:
        solution_str: the response.
        ground_truth: the right answer. With anything but a text, the score is 0.
        data_source, extra_info, kwargs: not used. verl passes them to every reward.

    Returns:
        `score`: the length of the longest common subsequence of answer and ground truth, divided by the length of the
        longer one. It is from 0 to 1, and leaving letters out gains nothing.
        `acc`: 1.0 if the answer is right, else 0.0.
        `format`: 1.0 if there is an answer, else 0.0.
    """
    answer = tagged_answer(solution_str, MAX_ANSWER_LENGTH)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    if not isinstance(ground_truth, str) or not answer or not ground_truth:
        return {"score": 0.0, "acc": 0.0, "format": 1.0}
    score = common_length(answer, ground_truth) / max(len(answer), len(ground_truth))
    return {"score": score, "acc": float(answer == ground_truth), "format": 1.0}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Raise ValueError unless the ground truth is a text that is not empty.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    if not isinstance(ground_truth, str) or not ground_truth:
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): reversal needs the text backwards"
        )


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common subsequence of two texts.

    Source: Hyyrö, Bit-parallel LCS-length computation revisited, 2004. A bit of an integer stands for each character of
    the first text, so that each character of the second takes only one step.
    """
    # For each character, the places where the first text has it.
    places_by_character: dict[str, int] = {}
    for place, character in enumerate(first):
        places_by_character[character] = places_by_character.get(character, 0) | 1 << place
    all_places = (1 << len(first)) - 1
    # At the end, the number of places that are not open is the length of the subsequence.
    open_places = all_places
    for character in second:
        matches = open_places & places_by_character.get(character, 0)
        # In each run of open places, this closes the lowest match, and opens the closed place above the run again.
        open_places = ((open_places + matches) | (open_places - matches)) & all_places
    return len(first) - open_places.bit_count()
