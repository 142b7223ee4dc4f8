"""Fixed bounds: nothing observed, nothing decided; metrics that do not fit their declaration. Not covered: the weights
that use the bounds.
"""

import math

import pytest
import torch

from tests.losses.methods.hand_rows import row, tokens_at
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.methods import Bounds, FixedBounds


def test_bounds_are_as_given_and_no_bound_is_one_that_no_ratio_reaches():
    for low, high, expected in ((0.8, 1.28, (0.8, 1.28)), (None, None, (0.0, math.inf))):
        method, t = FixedBounds(clip_low=low, clip_high=high), tokens_at(row(1.0), row(1.0))
        statistics = method.statistics(t)
        decision = method.decide(statistics)
        assert method.statistics_size == len(statistics) == len(decision) == 0
        assert method.bounds(t, decision) == expected and method.metrics(statistics, decision) == {}
    assert Bounds(0.8, row(1.1, 1.2, 1.3)).clip(row(0.5, 1.2, 9.0)).tolist() == [[0.8, 1.2, 1.3]]


class WithMetrics(FixedBounds):
    logs = (of_decision("spread", "", ""), of_decision("width", "", "", numbered="bin"))


def test_a_family_has_a_name_for_each_member_and_a_number_its_own():
    values = {"spread": torch.tensor(0.5), "width": torch.tensor([1.0, 2.0])}
    declared = [(metric.name, members) for metric, members in find_declarations(WithMetrics(), values)]
    assert declared == [("spread", {"spread": 0.5}), ("width", {"width/bin_0": 1.0, "width/bin_1": 2.0})]


@pytest.mark.parametrize(
    ("name", "dimensions", "message"),
    [
        ("spread", 1, "'spread' with 1 dimensions. It is declared as a single number and must have no dimension"),
        ("width", 0, "'width' with 0 dimensions. It is declared as a family, by numbered=, and must have one"),
        ("width", 2, "'width' with 2 dimensions. It is declared as a family, by numbered=, and must have one"),
        ("height", 0, "'height', which it does not declare"),
    ],
)
def test_a_metric_that_does_not_fit_its_declaration_is_named(name, dimensions, message):
    with pytest.raises(ValueError, match=message):
        find_declarations(WithMetrics(), {name: torch.zeros((1,) * dimensions)})
