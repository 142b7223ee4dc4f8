"""VESPO's weight of a sequence's ratio by hand, and its range; test_golden.py has TRL's numbers.

Not covered: TRL's truncated correction inside the sequence's ratio, which this plugin leaves to verl's correction.
"""

import math

import torch
from torch.testing import assert_close

from verl_clipx.methods.vespo import Vespo

from .at import tokens_at


def rows(*sequences):
    return torch.tensor(sequences, dtype=torch.float64)


def weight(method, ratio, advantages, mask=None):
    t = tokens_at(ratio, advantages, mask=mask, clamp=method.log_ratio_clamp)
    return method.gradient_weight(t, method.bounds(t, method.decide(method.statistics(t))))


def test_by_hand_for_either_sign():
    # Sequences with w = 1, 2 and 0.5.
    ratio = rows([0.5, 2.0], [1.0, 2.0], [0.25, 2.0])
    for advantage, k, decay in ((1.0, 2, 3), (0.0, 2, 3), (-1.0, 3, 2)):
        found = weight(Vespo(), ratio, torch.full_like(ratio, advantage))
        expected = [1.0, 2**k * math.exp(-decay), 0.5**k * math.exp(0.5 * decay)]
        assert_close(found, rows(*([value] * 2 for value in expected)))


def test_masked_tokens_are_no_part_of_the_product():
    ratio, mask = rows([1.0, 50.0]), torch.tensor([[True, False]])
    assert weight(Vespo(), ratio, torch.ones_like(ratio), mask)[0, 0] == 1


def test_the_sequences_log_ratio_has_a_range():
    assert_close(weight(Vespo(), rows([1e-6, 1e-6]), rows([1.0, 1.0]))[0, 0].item(), 1e-16 * math.exp(3 - 3e-8))
    # exp(20) inside the exponent: no weight is left, and none overflows.
    assert weight(Vespo(), rows([1e6, 1e6]), rows([-1.0, -1.0])).tolist() == [[0.0, 0.0]]
