"""The standard error of the score over prompts, and how it comes into verl's metrics.

Covers: values by hand, for equal and unequal groups, for one prompt; what verl's trainers call, with and without uid.
Not covered: a run of a trainer (tests/end_to_end/test_training.py).
"""

import importlib

import numpy
import pytest
import torch
from verl import DataProto
from verl.utils.tracking import Tracking

from verl_clipx.runs import keys
from verl_clipx.trainer.reward_error import standard_error

# Every module of verl's that imports the function by name.
TRAINERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.ray_trainer",
)


@pytest.mark.parametrize(
    ("scores", "prompts", "counted", "expected"),
    [
        # Equal groups: the prompts' means are 0.5, 1.0, 0.0, with standard deviation 0.5, however they are ordered.
        ([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2], None, 0.5 / 3**0.5),
        ([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [2, 1, 0, 0, 1, 2], None, 0.5 / 3**0.5),
        # Mean 1/3; totals of what is left: (1 - 1/3), (0 - 2/3): 4/9 + 4/9, times 2, the root over 3 responses.
        ([1.0, 0.0, 0.0], [5, 7, 7], None, (16 / 9) ** 0.5 / 3),
        # An aborted response does not count.
        ([1.0, 0.0, 0.0, 9.0], [5, 7, 7, 7], [True, True, True, False], (16 / 9) ** 0.5 / 3),
        # One prompt, or none.
        ([0.0, 1.0], [3, 3], None, None),
        ([0.0, 1.0], [3, 4], [False, False], None),
    ],
)
def test_it_is_over_the_prompts_totals(scores, prompts, counted, expected):
    counted = [True] * len(scores) if counted is None else counted
    found = standard_error(torch.tensor(scores), torch.tensor(prompts), torch.tensor(counted))
    assert found == (None if expected is None else pytest.approx(expected))


def batch(with_uid: bool) -> DataProto:
    """Two prompts, two responses of two tokens each; the second prompt's last response was aborted."""
    ones = torch.ones(4, 2)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    tensors = {
        "prompts": torch.tensor([[0, 4], [0, 4], [3, 4], [3, 4]]),
        "responses": ones.long(),
        "response_mask": mask,
        "attention_mask": torch.cat([ones.long(), mask], 1),
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": ones,
        "returns": ones,
    }
    uid = {"uid": numpy.array(["a", "a", "b", "b"], dtype=object)} if with_uid else {}
    return DataProto.from_dict(tensors=tensors, non_tensors=uid)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("with_uid", [False, True])
def test_verls_trainers_get_it_beside_the_mean(trainer, with_uid):
    compute = importlib.import_module(trainer).compute_data_metrics
    Tracking("project", "run", [], config={"clipx": {"log": False}})
    metrics = compute(batch=batch(with_uid), use_critic=False)
    Tracking("project", "run", [], config={})
    assert keys.REWARD_ERROR not in compute(batch=batch(with_uid), use_critic=False)
    assert metrics["critic/score/mean"] == pytest.approx(1 / 3)
    # Totals of what is left of the mean: 1/3 and -1/3.
    assert metrics[keys.REWARD_ERROR] == pytest.approx((4 / 9) ** 0.5 / 3)
