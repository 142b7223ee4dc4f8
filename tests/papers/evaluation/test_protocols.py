"""Which checkpoints a protocol takes.

Not covered: finding checkpoints on disk (test_checkpoints.py), how they are combined (test_summary.py).
"""

import numpy as np
import pytest

from verl_clipx.papers.evaluation.protocols import (
    BEST_VALIDATION,
    GREEDY,
    MEAN_OF_LAST_THREE,
    SAMPLED,
    choose_checkpoints,
)

STEPS = [100, 20, 60, 40, 80]


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [
        (GREEDY, [100]),
        (SAMPLED, [100]),
        (MEAN_OF_LAST_THREE, [60, 80, 100]),
        (BEST_VALIDATION, [20, 40, 60, 80, 100]),
    ],
)
def test_the_checkpoints_that_count(protocol, steps):
    assert choose_checkpoints(protocol, STEPS) == steps


@pytest.mark.parametrize(("protocol", "steps"), [(MEAN_OF_LAST_THREE, [20, 40]), (BEST_VALIDATION, []), (GREEDY, [])])
def test_too_few_checkpoints_are_an_error(protocol, steps):
    with pytest.raises(ValueError, match=f"--protocol {protocol.name} needs"):
        choose_checkpoints(protocol, steps)


def test_the_best_of_equal_checkpoints_is_too_high_by_what_the_docstring_says():
    generator = np.random.default_rng(0)
    for checkpoints, excess in ((3, 0.85), (10, 1.54)):
        means = generator.standard_normal((20_000, checkpoints))
        found = np.mean([max(row) for row in means])
        assert found == pytest.approx(excess, abs=0.02)
