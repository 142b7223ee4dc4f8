"""Each method that verl has too, beside verl's own loss, as its test states it (`VERLS`): loss, gradient and metrics
under every aggregation. Not covered: normalisers of a mini-batch (tests/training/worker/test_aggregation.py).
"""

import pytest

from .facts import facts

VERLS = facts("VERLS")
CASES = [(name, mode, spread) for name, case in VERLS.items() for mode in case.modes for spread in case.spreads]


@pytest.mark.parametrize(("name", "mode", "spread"), CASES)
def test_same_as_verls_own(name, mode, spread):
    VERLS[name].check(mode, spread)
