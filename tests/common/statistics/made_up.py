"""Logs of trainings whose true difference is known, and how they differ, for tests of verdicts."""

import numpy as np


def lasting_offsets(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Returns rewards of a setting's trainings (seeds, steps) that differ by 2 points throughout, and by 5 a step."""
    return 0.5 + 0.02 * generator.standard_normal((seeds, 1)) + 0.05 * generator.standard_normal((seeds, steps))


def walks(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the same of trainings that wander, 1 point a step: what a step gains or loses stays."""
    return lasting_offsets(seeds, steps, generator) + 0.01 * generator.standard_normal((seeds, steps)).cumsum(axis=1)


def drifts(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the same of trainings that learn at different speeds: by 30 points over the run, more or less by 10."""
    speed = 0.3 + 0.1 * generator.standard_normal((seeds, 1))
    return lasting_offsets(seeds, steps, generator) + speed * np.linspace(0, 1, steps)


def collapses(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the same of trainings of which a fifth lose nearly everything at some step."""
    after = np.arange(steps) >= generator.integers(steps, size=(seeds, 1))
    fell = after & (generator.random((seeds, 1)) < 0.2)
    return np.where(fell, 0.02, 1.0) * lasting_offsets(seeds, steps, generator)


LOGS = {"lasting offsets": lasting_offsets, "walks": walks, "drifts": drifts, "collapses of a fifth": collapses}
