"""Double-sided importance sampling by hand: inside, at and outside the bounds, for both signs and for A = 0.

Covers each bound alone; test_properties.py has the contract and micro-batches, tests/worker/test_golden.py SkyRL's own
numbers. Not covered: which policy the ratio is measured from.
"""

import math

import pytest
from torch.testing import assert_close

from verl_clipx.methods.two_sided import TwoSided

from .at import row, tokens_at, weight

RATIO = row(0.5, 0.8, 1.0, 1.2, 1.5)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_whatever_is_outside_is_dropped_for_every_sign(advantage):
    assert_close(weight(TwoSided(), RATIO, row(*[advantage] * 5)), row(0.0, 0.8, 1.0, 1.2, 0.0))


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ({"clip_low": None}, (0.5, 0.8, 1.0, 1.2, 0.0)),
        ({"clip_high": None}, (0.0, 0.8, 1.0, 1.2, 1.5)),
        ({"clip_low": None, "clip_high": None}, (0.5, 0.8, 1.0, 1.2, 1.5)),
    ],
)
def test_null_is_no_bound(sides, expected):
    assert_close(weight(TwoSided(**sides), RATIO, row(*[-1.0] * 5)), row(*expected))


def test_the_value_is_the_weighted_log_probability():
    t = tokens_at(row(1.1, 2.0), row(3.0, 3.0), old_log_prob=row(math.log(0.5), math.log(0.25)))
    method = TwoSided()
    bounds = method.bounds(t, method.decide(method.statistics(t)))
    value = method.loss_value(t, bounds, method.gradient_weight(t, bounds))
    assert_close(value, row(-1.1 * 3 * math.log(0.55), 0.0))
