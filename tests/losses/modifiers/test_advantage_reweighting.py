"""Advantage Reweighting by hand, with either policy's probability, and its identity at alpha 0. Does not cover the
released code's vectors (tests/training/worker/test_golden.py) or which tensors a worker passes.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.losses.methods.hand_rows import tokens_at
from verl_clipx.losses.modifiers import AdvantageReweighting

ADVANTAGES = [[2.0, -2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # alpha = 0.3, old probabilities 1, 0.5 and 0: factors 0.3 * 1 + 0.7, 0.3 * 0.5 + 0.7 and 0.7.
        ({}, [[2.0, -1.7, 1.4]]),
        # The current ones are 0.5, 0.25 and 0: factors 0.85, 0.775 and 0.7.
        ({"probability": "current"}, [[1.7, -1.55, 1.4]]),
        ({"alpha": 1.0}, [[2.0, -1.0, 0.0]]),
        ({"alpha": 0.0}, ADVANTAGES),
    ],
)
def test_by_hand(parameters, expected, dtype):
    old_log_prob = torch.tensor([[0.0, math.log(0.5), -math.inf]], dtype=dtype)
    t = tokens_at(
        torch.full((1, 3), 0.5, dtype=dtype), torch.tensor(ADVANTAGES, dtype=dtype), old_log_prob=old_log_prob
    )
    actual = AdvantageReweighting(**parameters).advantages(t)
    assert_close(actual, torch.tensor(expected, dtype=dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
