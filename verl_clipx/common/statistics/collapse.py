"""Collapses of trainings, which a mean over seeds does not show."""

from collections.abc import Sequence

import numpy as np

STEPS, PART = 3, 10
"""A level is the mean of a tenth of the steps, at least 3: one bad rollout batch is no collapse."""

KEPT = 0.25
"""A collapsed training fell below this share of its best level. Of the 78 runs of docs/results/cpu_small.md three fell
to 0.04 or less, and no other below 0.5."""

NOISE = 6.0
"""Standard errors of a level, from the differences of neighbouring steps, that a fall must exceed."""

COVERAGE = {3: 64, 5: 68, 10: 89, 20: 92}
"""Number of seeds of each method to the per cent of 95 % intervals that hold the true difference, if a fifth of one
method's trainings lose 30 points and the others differ by 2 points: tests/common/statistics/test_collapse.py."""


def collapse(rewards: Sequence[float] | np.ndarray, kept: float = KEPT) -> int | None:
    """Finds where a training collapsed: its level fell below a quarter of its best before, for a while or for good.

    A level is the mean over a tenth of the steps, above 0 or above the lowest reward if that is negative. A fall within
    the noise of the steps is no collapse.

    Args:
        rewards: ``[steps]``, finite, in order; returned is the index of the first step of that level.
        kept: the share of its best that a level must fall below.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    steps = max(STEPS, len(rewards) // PART)
    if len(rewards) <= steps:
        return None
    levels = np.convolve(rewards, np.full(steps, 1 / steps), "valid") - min(0.0, rewards.min())
    best = np.maximum.accumulate(levels)
    # With normal noise, neighbours differ by 2 / sqrt(pi) standard deviations on average.
    error = np.abs(np.diff(rewards)).mean() * np.sqrt(np.pi) / 2 / np.sqrt(steps)
    fallen = (levels < kept * best) & (best - levels > NOISE * error)
    return int(np.argmax(fallen)) if fallen.any() else None


def last_level(values: Sequence[float] | np.ndarray) -> float:
    """Returns the level at which a training ends: the mean of its last tenth of steps, as in `collapse`."""
    return float(np.mean(values[-max(STEPS, len(values) // PART) :]))


def caution(seeds: int) -> str | None:
    """Warns of collapses behind an interval over so many seeds of each method; None below 3 and from 20 on."""
    known = max((count for count in COVERAGE if count <= seeds), default=None)
    if known is None or seeds >= max(COVERAGE):
        return None
    what = f"If a fifth of one method’s trainings collapse, an interval of {known} seeds holds the true difference in"
    return f"{what} about {COVERAGE[known]} % of the cases"
