"""A mean or a share with its 95 % interval, over whatever is independent: seeds, questions, problems."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.variance import CONFIDENCE, effective_units, squared_error, too_few_units

MIN_SEEDS = 3
"""The fewest trainings of a method that allow an interval over seeds; docs/evaluation.md shows what 2 give."""

ROUNDING = 1e-12
"""A standard error below this share of the means is 0 up to rounding."""


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its 95 % interval, None if it has none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (" (no interval)" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]")


def estimate(values: Sequence[float] | np.ndarray, clusters: np.ndarray | None = None) -> Estimate:
    """Mean and Student's interval over independent values.

    The interval may leave the values' range; cutting it would hide how little few of them say.

    There is none if there are too few values or clusters, or if all are equal, since nothing says then how far chance
    goes.

    Args:
        values: ``[questions]``, or one for each problem or seed.
        clusters: ``[questions]`` labels, if questions share a source: see `squared_error`.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"finite values in one dimension are needed, at least one; got an array of {values.shape}")
    mean = float(values.mean())
    error = float(np.sqrt(squared_error(values, clusters)))
    if too_few_units(len(values), clusters) or error <= ROUNDING * abs(mean):
        return Estimate(mean)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, effective_units(len(values), clusters) - 1)) * error
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def estimate_over_seeds(values: Sequence[float]) -> Estimate:
    """As `estimate`, over trainings: with fewer than `MIN_SEEDS` there is no interval."""
    return estimate(values) if len(values) >= MIN_SEEDS else Estimate(float(np.mean(values)))


def share(count: int, units: int) -> Estimate:
    """Returns a share with its exact interval (Clopper and Pearson, Biometrika 26, 1934), also for shares of 0 and 1.

    Args:
        count: the units to which something happened.
        units: all of them, independent, at least 1.
    """
    interval = stats.binomtest(count, units).proportion_ci(CONFIDENCE, method="exact")
    return Estimate(mean=count / units, low=float(interval.low), high=float(interval.high))
