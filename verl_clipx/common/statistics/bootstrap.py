"""Percentile bootstrap over units that are independent of each other: prompts, not tokens."""

from collections.abc import Sequence

import numpy as np

from verl_clipx.common.statistics.variance import CONFIDENCE

FEWEST_UNITS = 5
"""With fewer units there is no interval: the few different resamples would say almost nothing about the population."""


def resamples(units: int, replicates: int, seed: int = 0) -> np.ndarray:
    """Draws the units of each replicate with replacement, ``[replicates, units]`` int64; equal for equal seeds."""
    return np.random.default_rng(seed).integers(units, size=(replicates, units))


def percentile_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the interval of all but the outer 5 % of the replicates' finite values; None if none is finite."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)
