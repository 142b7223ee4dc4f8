"""verl's own example scripts, each composed by Hydra: alone, and with the groups whose outcomes are written down.

Covers: which of them verl composes alone, and tests/claims/test_verl_examples.py's outcomes without its shortcut: 350
compositions, three minutes. Not covered: training.
"""

import pytest

from tests.claims.verl_examples.examples import GROUPS, by_hydra, examples, outcomes, why_not_alone

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_hydra_gives_what_is_written_down(example):
    missing = why_not_alone(example)
    found = {group: by_hydra(example, group) for group in GROUPS} if missing is None else {"alone": missing}
    assert found == outcomes()[example.name]
