"""What a trace has of a token, by hand: of a method, and of a loss that is told by its gradient.

Not covered: agreement with every method's loss, and shaping (tests/worker/test_tracer.py).
"""

import pytest
import torch

from verl_clipx.base.method import Bounds
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.loss import apply
from verl_clipx.loss.observed import ObservedTokens
from verl_clipx.loss.token_trace import observed_token_trace, token_trace
from verl_clipx.methods import method_named

RATIO = torch.tensor([[1.5, 0.5, 1.0]], dtype=torch.float64)
OLD = torch.full((1, 3), -2.0, dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0]], dtype=torch.float64)
MASK = torch.ones(1, 3, dtype=torch.bool)
TOKENS = OLD + RATIO.log(), OLD, ADVANTAGES, MASK


def as_lists(trace):
    return {name: values.tolist()[0] for name, values in trace._asdict().items()}


def test_a_methods_by_hand():
    grpo = method_named("grpo")()
    found = as_lists(token_trace(grpo, apply(grpo, None, Inputs(*TOKENS)), torch.tensor(0.5)))
    # Clipped above with A > 0; below with A > 0 it keeps its gradient; each times the factor.
    assert found["weight"] == pytest.approx([0, 0.25, 0.5])
    assert found["ratio"] == found["bounded"] == pytest.approx([1.5, 0.5, 1])
    assert found["low"] == [0.8] * 3 and found["high"] == [1.2] * 3 and found["advantage"] == [2, 2, -1]


@pytest.mark.parametrize("by_sequence", [False, True])
def test_an_observed_losss_by_hand(by_sequence):
    gradient = torch.tensor([[-0.6, 0.0, 0.1]], dtype=torch.float64)
    tokens, share = ObservedTokens(*TOKENS, gradient), torch.full((1, 3), 0.2, dtype=torch.float64)
    found = as_lists(observed_token_trace(tokens, Bounds(0.9, 1.1), by_sequence, share))
    # F = -g / (share * A).
    assert found["weight"] == pytest.approx([1.5, 0, 0.5])
    mean = 0.75 ** (1 / 3)
    assert found["bounded"] == pytest.approx([mean] * 3 if by_sequence else [1.5, 0.5, 1])


def test_without_an_advantage_there_is_no_weight():
    tokens = ObservedTokens(*TOKENS[:2], torch.zeros(1, 3), MASK, torch.ones(1, 3))
    assert as_lists(observed_token_trace(tokens, Bounds(0.8, 1.2), False, 1.0))["weight"] == [0, 0, 0]
