"""What verl's data say of each sequence.

Covers: prompts numbered alike in every micro-batch; ages in weight versions, and none where the rollout doesn't say.
Not covered: real rollouts (tests/end_to_end).
"""

import torch

from tests.jagged import micro_batch
from verl_clipx.check.contract import example
from verl_clipx.worker.layout import ages, prompt_groups

ROWS = [0, 1, 2, 3, 4]


def test_a_prompt_has_one_number_in_every_micro_batch():
    whole, part = (prompt_groups(micro_batch(example(), rows)[0]) for rows in (ROWS, [4, 1]))
    # Two rows a prompt.
    assert torch.equal(part, whole[[4, 1]]) and len(whole.unique()) == 3
    assert whole.dtype == torch.int64 and (whole >= 0).all() and whole[0] == whole[1]


def test_age_is_counted_in_weight_versions():
    data = {"extra_fields": [{"max_global_steps": step} for step in (4, 3, 1, 7)]}
    assert ages(data, 5).tolist() == [1, 2, 4, 0]
    assert ages({}, 5) is None
    assert ages({"extra_fields": [{"max_global_steps": 1}, {}]}, 5) is None
