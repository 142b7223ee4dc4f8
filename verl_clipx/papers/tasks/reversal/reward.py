"""Rule reward of reversal: how much of the last `<answer>` is the text backwards.

Responses come from a policy under training: they must never raise an error or cost more than a scan.
"""

from typing import Any

from verl_clipx.papers.responses import tagged_answer

# Answers have about fifty characters. Longer texts than this are not compared.
MAX_ANSWER_LENGTH = 256


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; never raises, and any thread may call it.

    Args:
        ground_truth: the right answer; with anything but a text the score is 0.

    Returns:
        `score`, the length of the longest common subsequence of answer and ground truth, divided by the larger of their
        lengths: 0 to 1, so that leaving letters out gains nothing; `acc`, 1.0 if the answer is right, else 0.0;
        `format`, 1.0 if there is an answer.
    """
    answer = tagged_answer(solution_str, MAX_ANSWER_LENGTH)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    if not isinstance(ground_truth, str) or not answer or not ground_truth:
        return {"score": 0.0, "acc": 0.0, "format": 1.0}
    score = common_length(answer, ground_truth) / max(len(answer), len(ground_truth))
    return {"score": score, "acc": float(answer == ground_truth), "format": 1.0}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    if not isinstance(ground_truth, str) or not ground_truth:
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): reversal needs the text backwards"
        )


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common subsequence of two texts.

    A bit of an integer stands for each character of the first text (Hyyrö, Bit-parallel LCS-length computation
    revisited, 2004), so that each character of the second takes only one step.
    """
    places: dict[str, int] = {}
    for place, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << place
    every = (1 << len(first)) - 1
    open_places = every
    for character in second:
        places_of_character = open_places & places.get(character, 0)
        open_places = ((open_places + places_of_character) | (open_places - places_of_character)) & every
    return len(first) - open_places.bit_count()
