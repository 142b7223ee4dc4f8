"""Made-up rewards of trainings that have no difference of method, and the rewards of the stored runs.

A function that draws rewards takes the number of seeds, the number of steps and a generator, and returns the rewards of
a setting's trainings, (seeds, steps).
"""

from pathlib import Path

import numpy as np
import pandas

STORED_STEPS = pandas.read_csv(Path(__file__).parents[3] / "docs" / "results" / "cpu_small_steps.csv")


def draw_lasting_offsets(seeds, steps, generator):
    """Draw rewards that differ by 2 points throughout a training, and by 5 a step."""
    return 0.5 + 0.02 * generator.standard_normal((seeds, 1)) + 0.05 * generator.standard_normal((seeds, steps))


def draw_walks(seeds, steps, generator):
    """Draw the same for trainings that wander, 1 point a step: what a step gains or loses stays."""
    offsets = draw_lasting_offsets(seeds, steps, generator)
    return offsets + 0.01 * generator.standard_normal((seeds, steps)).cumsum(axis=1)


def draw_drifts(seeds, steps, generator):
    """Draw the same for trainings that learn at different speeds: 30 points over the run, more or less by 10."""
    speed = 0.3 + 0.1 * generator.standard_normal((seeds, 1))
    return draw_lasting_offsets(seeds, steps, generator) + speed * np.linspace(0, 1, steps)


def draw_collapses_of_a_fifth(seeds, steps, generator):
    """Draw the same for trainings of which a fifth lose nearly everything at some step."""
    is_after_fall = np.arange(steps) >= generator.integers(steps, size=(seeds, 1))
    has_fallen = is_after_fall & (generator.random((seeds, 1)) < 0.2)
    return np.where(has_fallen, 0.02, 1.0) * draw_lasting_offsets(seeds, steps, generator)


DRAWS = [draw_lasting_offsets, draw_walks, draw_drifts, draw_collapses_of_a_fifth]
