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
    """Return the value that `encode_ground_truth` was given; never raises.

    Args:
        ground_truth: a row's ground truth. Files from other builders may contain fields or a list; these are returned
            as they are.

    Returns:
        The decoded value. A text that is not JSON is returned as it is.
    """
    if not isinstance(ground_truth, str):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except (ValueError, RecursionError):
        return ground_truth
