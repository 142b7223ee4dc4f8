"""Collapses of trainings, which a mean over seeds does not show."""

from collections.abc import Sequence

import numpy as np

STEPS = 3
PART = 10
"""A level is the mean of 1 / PART of all steps, but of at least STEPS: one bad rollout batch is no collapse."""

KEPT = 0.25
"""A collapsed training fell below this share of its best level. Of the 78 runs of docs/results/small_runs.md three fell
to 0.04 or less, and no other below 0.5."""

NOISE = 6.0
"""Standard errors of a level, from the differences of neighbouring steps, that a fall must exceed."""

COVERAGE = {3: 64, 5: 68, 10: 89, 20: 92}
"""Number of seeds of each method to the per cent of 95 % intervals that hold the true difference, if a fifth of one
method's trainings lose 30 points and the others differ by 2 points: tests/common/statistics/test_collapse.py."""


def level_steps(count: int) -> int:
    """Return how many steps a level is the mean of, in a training of `count` steps."""
    return max(STEPS, count // PART)


def collapse(rewards: Sequence[float] | np.ndarray, kept: float = KEPT) -> int | None:
    """Return the index of the step at which a training collapsed, None if it did not.

    It collapsed if its level fell below a quarter of its best before, for a while or for good. A level is the mean over
    a tenth of the steps, above 0 or above the lowest reward if that is negative. A fall within the noise of the steps
    is no collapse. The step is the one that parts the higher rewards from the lower ones best: a change at once is
    dated at its first low reward, a slow one near its middle.

    Args:
        rewards: ``[steps]``, finite, in order.
        kept: the share of its best that a level must fall below, in (0, 1).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    steps = level_steps(len(rewards))
    if len(rewards) <= steps:
        return None
    levels = np.convolve(rewards, np.full(steps, 1 / steps), "valid") - min(0.0, rewards.min())
    best = np.maximum.accumulate(levels)
    # With normal noise, neighbours differ by 2 / sqrt(pi) standard deviations on average.
    error = np.abs(np.diff(rewards)).mean() * np.sqrt(np.pi) / 2 / np.sqrt(steps)
    fallen = (levels < kept * best) & (best - levels > NOISE * error)
    if not fallen.any():
        return None
    # The change lies between the last level of the upper half and the end of the first that had fallen.
    window = int(np.argmax(fallen))
    middle = (levels[window] + best[window]) / 2
    last_high = int(np.flatnonzero(levels[:window] >= middle)[-1])
    begin = max(0, last_high - steps + 1)
    return begin + _first_of_lower(rewards[begin : window + steps])


def _first_of_lower(values: np.ndarray) -> int:
    """Return the index of the first lower value: where two means, before it and from it on, fit the values best."""
    number_before = np.arange(1, len(values))
    number_after = len(values) - number_before
    sums = np.cumsum(values)
    fall = sums[:-1] / number_before - (sums[-1] - sums[:-1]) / number_after
    # Two means lower the squared error by before * after * fall^2 / all. With the sign of the fall, rises come last.
    return int(np.argmax(number_before * number_after * fall * np.abs(fall))) + 1


def last_level(values: Sequence[float] | np.ndarray) -> float:
    """Return the level at which a training ends: the mean of its last tenth of steps, as in `collapse`."""
    return float(np.mean(values[-level_steps(len(values)) :]))


def caution(seeds: int) -> str | None:
    """Warn of collapses behind an interval over so many seeds of each method; None below 3 and from 20 on."""
    if seeds < min(COVERAGE) or seeds >= max(COVERAGE):
        return None
    # The largest number of seeds that was tried and is not above this one.
    tried = max(count for count in COVERAGE if count <= seeds)
    return (
        f"If a fifth of one method’s trainings collapse, an interval of {tried} seeds holds the true difference in "
        f"about {COVERAGE[tried]} % of the cases"
    )
