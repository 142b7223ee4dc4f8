"""Trainings at a learning rate of 0 (benchmarks/standing.py). Covers: what is read from a log and from its updates, and
which measurement of the floor is said to be nearer. Not covered: the trainings themselves, which take minutes.
"""

import math

import pytest
import torch
from standing import standing_of

FLOOR = "actor/clipx/floor"
SECOND_FLOOR = "actor/clipx/floor_recut"


@pytest.mark.parametrize(("log_ratio", "nearer"), [(0.0, "second"), (0.03, "first")])
def test_the_floor_is_of_all_tokens_and_the_nearer_measurement_is_named(log_ratio, nearer):
    # What the first update of two rollout batches logs, of 30 and of 10 tokens; only the first has a second floor.
    steps = [
        {
            f"{FLOOR}/log_ratio": log_ratio,
            f"{FLOOR}/tokens/bin_0": 20.0,
            f"{FLOOR}/tokens/bin_4": 10.0,
            f"{SECOND_FLOOR}/log_ratio": 0.02,
            f"{SECOND_FLOOR}/tokens/bin_3": 40.0,
        },
        {
            f"{FLOOR}/log_ratio": log_ratio + 0.01,
            f"{FLOOR}/tokens/bin_0": 0.0,
            f"{FLOOR}/tokens/bin_4": 10.0,
        },
    ]
    # The log-ratios of each update, batch by batch.
    updates = [
        [torch.zeros(30), torch.tensor([0.01, -0.05]), torch.tensor([0.03])],
        [torch.zeros(10), torch.tensor([0.0, 0.0, 0.3])],
    ]
    standing = standing_of(steps, updates)
    assert math.isclose(standing.first, log_ratio + 0.01 * 10 / 40)
    assert standing.second == 0.02
    assert standing.later == pytest.approx([0.03, 0.03, 0.1])
    assert standing.outside == pytest.approx(1 / 6)
    assert standing.tokens == (40, 40, 6)
    assert standing.nearer == nearer
