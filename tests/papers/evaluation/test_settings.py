"""Sampling settings, and which checkpoints a protocol takes.

Not covered: what verl is told of them (test_validation_run.py); how checkpoints are combined (test_estimators.py).
"""

import pytest

from verl_clipx.papers.evaluation.checkpoints import Checkpoint
from verl_clipx.papers.evaluation.settings import PROTOCOLS, SamplingSettings


def test_each_seed_adds_its_samples_and_equal_greedy_samples_are_refused():
    assert SamplingSettings(samples=8, max_tokens=8, seeds=(0, 5)).samples_per_question == 16
    SamplingSettings(samples=1, max_tokens=8, temperature=0)
    for samples, seeds in ((4, (0,)), (1, (0, 1))):
        with pytest.raises(ValueError, match=f"--samples {samples} --temperature 0"):
            SamplingSettings(samples=samples, max_tokens=8, temperature=0, seeds=seeds)


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [("greedy", [5]), ("sampled", [5]), ("mean-of-last-three", [3, 4, 5]), ("best-validation", [1, 2, 3, 4, 5])],
)
def test_the_checkpoints_that_count(protocol, steps):
    saved = [Checkpoint(f"global_step_{step}", step, "") for step in range(1, 6)]
    assert [one.step for one in PROTOCOLS[protocol].choose(saved)] == steps
    if len(steps) == 3:
        with pytest.raises(ValueError, match=f"--protocol {protocol} needs 3"):
            PROTOCOLS[protocol].choose(saved[:2])
