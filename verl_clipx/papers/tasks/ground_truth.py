"""Stores ground truths that are fields or a list as text, so that the files of all tasks have the same schema.

verl joins the files of `data.train_files` with Hugging Face datasets, which rejects a column that contains text in one
file and fields or a list in another.
"""

import json
from typing import Any


def encode_ground_truth(truth: Any) -> str:
    """Return fields or a list as one line of JSON, for a row's `reward_model.ground_truth`."""
    return json.dumps(truth, ensure_ascii=False)


def decode_ground_truth(ground_truth: Any) -> Any:
    """Return the value of a text in JSON, and anything else as it is, such as other builders' fields; never raises."""
    try:
        return json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except (ValueError, RecursionError):
        return ground_truth


def spell_answer(answer: Any) -> str:
    """Return a right answer as text, 5.0 as 5; "" for what is missing, or neither text nor number."""
    # Tables spell a missing value as NaN, which is not equal to itself.
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or answer != answer:
        return ""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()
