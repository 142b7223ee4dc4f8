"""Which checkpoints a protocol takes.

Not covered: finding checkpoints on disk (test_checkpoints.py), how they are combined (test_summary.py).
"""

import numpy as np
import pytest

from verl_clipx.papers.evaluation.protocols import PROTOCOLS, choose_checkpoints

STEPS = [100, 20, 60, 40, 80]


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [
        ("greedy", [100]),
        ("sampled", [100]),
        ("mean-of-last-three", [60, 80, 100]),
        ("best-validation", [20, 40, 60, 80, 100]),
    ],
)
def test_the_checkpoints_that_count(protocol, steps):
    assert choose_checkpoints(PROTOCOLS[protocol], STEPS) == steps
    with pytest.raises(ValueError, match=f"--protocol {protocol} needs"):
        choose_checkpoints(PROTOCOLS[protocol], [20, 40] if len(steps) == 3 else [])


def test_the_best_of_equal_checkpoints_is_too_high_by_what_the_docstring_says():
    generator = np.random.default_rng(0)
    for checkpoints, excess in ((3, 0.85), (10, 1.54)):
        means = generator.standard_normal((20_000, checkpoints))
        assert means.max(axis=1).mean() == pytest.approx(excess, abs=0.02)
