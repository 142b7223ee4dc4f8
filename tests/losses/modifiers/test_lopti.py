"""Lopti's split by hand. Not covered: the release's vectors (tests/training/worker/test_golden.py), the
passes' gradients (tests/training/worker/test_layout.py), the worker's optimizer steps.
"""

import math

import pytest
import torch

from verl_clipx.losses.modifiers.lopti import low_probability

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_threshold_is_low_only_if_equality_counts(dtype):
    # exp(0) is exactly 1; the third is a log-probability that rounding put above 0.
    old_log_prob = torch.tensor([[-0.25, 0.0, 2.0**-20, -math.inf, math.nan]], dtype=dtype)
    assert low_probability(old_log_prob, eta=1.0, equal=True).tolist() == [[True, True, True, True, False]]
    assert low_probability(old_log_prob, eta=1.0, equal=False).tolist() == [[True, False, False, True, False]]


def test_split_by_hand():
    eta = 0.5
    old_log_prob = torch.tensor([0.1, 0.499999, 0.5, 0.500001, 0.9], dtype=torch.float64).log().unsqueeze(0)
    assert low_probability(old_log_prob, eta=eta, equal=True).int().tolist() == [[1, 1, 1, 0, 0]]
    assert low_probability(old_log_prob, eta=eta, equal=False).int().tolist() == [[1, 1, 0, 0, 0]]
    # exp of the float32 number below log(0.5) rounds to 0.5 in float32; in float64 it is 0.49999998.
    old_log_prob = torch.tensor([[math.log(0.5)]]).nextafter(torch.tensor(-1.0))
    assert low_probability(old_log_prob, eta=0.5, equal=False).all()
    assert not low_probability(old_log_prob, eta=float(old_log_prob.double().exp()), equal=False).any()
