"""Percentile bootstrap over units that are independent of each other: prompts, not tokens."""

from collections.abc import Sequence

import numpy as np

from verl_clipx.common.statistics.variance import CONFIDENCE

FEWEST_UNITS = 5
"""With fewer units there is no interval: the few different resamples would say almost nothing about the population."""


def resamples(units: int, replicates: int, seed: int = 0) -> np.ndarray:
    """Draw the units of each replicate with replacement.

    Args:
        units: how many units there are.
        replicates: how often they are drawn anew.
        seed: the seed of the draws; equal seeds give equal draws.

    Returns:
        The indices of the units that each replicate has, (replicates, units), int64. An index may occur several times.
    """
    return np.random.default_rng(seed).integers(units, size=(replicates, units))


def percentile_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval that holds the middle CONFIDENCE (95 %) of the replicates' finite values.

    Args:
        values: a statistic of each replicate; values that are not finite are left out.

    Returns:
        The lower and the upper end; None if no value is finite.
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)
