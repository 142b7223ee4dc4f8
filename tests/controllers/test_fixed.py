"""Fixed bounds: nothing observed, nothing decided. Does not cover the losses that use them."""

import math

import pytest
import torch

from verl_clipx.controllers.fixed import FixedBounds


def test_bounds_are_as_given_and_the_vectors_are_empty():
    controller = FixedBounds(0.8, 1.28)
    tensor = torch.zeros(2, 3)
    statistics = controller.statistics(
        ratio=tensor, advantages=tensor, mask=tensor.bool(), log_prob=tensor, old_log_prob=tensor
    )
    decision = controller.decide(statistics)
    assert controller.statistics_size == len(statistics) == len(decision) == 0
    assert statistics.dtype == decision.dtype == torch.float64
    bounds = controller.token_bounds(decision, log_prob=tensor, old_log_prob=tensor, dtype=torch.float32)
    assert bounds == (0.8, 1.28)
    assert controller.metrics(statistics, decision) == {}


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(None, 1.2, (0.0, 1.2)), (0.8, None, (0.8, math.inf)), (None, None, (0.0, math.inf))]
)
def test_no_bound_is_one_that_no_ratio_reaches(low, high, expected):
    nothing = torch.zeros(0)
    bounds = FixedBounds(low, high).token_bounds(nothing, log_prob=nothing, old_log_prob=nothing, dtype=torch.float32)
    assert bounds == expected
