"""Sums through the reward's doors, and their data: form and skill told apart, no sum in both splits.

Not covered: training (tests/end_to_end).
"""

import re

import pytest

from verl_clipx.papers.tasks.sums.dataset import rows
from verl_clipx.papers.tasks.sums.reward import check_ground_truth, compute_score, compute_score_of_last_answer


def test_the_lenient_reward_takes_the_last_number():
    """What the strict one returns is in tests/papers/tasks/earned.yaml."""
    for text in ("42", "40 + 2 = 42", "41", "42 is the sum of 40 and 2", "42 " * 100, None):
        strict = compute_score("sums", text, "42")
        lenient = compute_score_of_last_answer("sums", text, "42")
        assert lenient == strict | {"score": strict["skill"], "acc": strict["skill"]}
    assert compute_score("sums", "42 " * 100, "42")["skill"] == 0.0


def test_a_sum_is_in_one_split_whatever_the_order_and_the_seed():
    split_of_pair = {}
    for split, size in {"train": 512, "test": 64}.items():
        for seed in (0, 1):
            rows_of_split = list(rows(None, split=split, prompt="sums_short", seed=seed))
            assert len(rows_of_split) == size
            for index, row in enumerate(rows_of_split):
                system, user = row["prompt"]
                assert system == {"role": "system", "content": "Answer with the number only."}
                question = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with the number only\.", user["content"])
                smaller, larger = sorted(map(int, question.groups()))
                assert larger < 100
                assert row["reward_model"]["ground_truth"] == str(smaller + larger)
                assert row["extra_info"] == {"index": index, "split": split}
                assert split_of_pair.setdefault((smaller, larger), split) == split


def test_a_truth_that_no_answer_matches_is_refused():
    check_ground_truth("sums", "42")
    # The reward finds only ASCII digits in a response.
    for truth in (42, None, "", "-1", "forty", "\u0664\u0662", {"answer": "42"}):
        with pytest.raises(ValueError, match="sums need"):
            check_ground_truth("sums", truth)
