"""Each method that verl has too, beside verl's own loss: loss, gradient and metrics under every aggregation.

Which methods these are, their tests state as `SAME_IN_VERL`. Not covered: normalisers of a mini-batch
(tests/training/worker/test_aggregation.py).
"""

import pytest

from .facts import facts

SAME_IN_VERL = facts("SAME_IN_VERL")
CASES = [
    (name, aggregation, spread)
    for name, case in SAME_IN_VERL.items()
    for aggregation in case.aggregations
    for spread in case.spreads
]


@pytest.mark.parametrize(("name", "aggregation", "spread"), CASES)
def test_same_as_verls_own(name, aggregation, spread):
    SAME_IN_VERL[name].check(aggregation, spread)
