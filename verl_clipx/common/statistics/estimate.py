"""A mean or a share with its 95 % interval, over whatever is independent: seeds, questions, problems."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from verl_clipx.common.statistics.variance import (
    CONFIDENCE,
    compute_squared_error,
    count_effective_units,
    explain_missing_interval,
)

MIN_SEEDS = 3
"""The fewest trainings of a method that allow an interval over seeds; docs/evaluation.md shows what 2 give."""

ROUNDING = 1e-12
"""A standard error below this share of the means is 0 up to rounding."""


@dataclass(frozen=True)
class Estimate:
    """A mean or a share with its 95 % interval.

    Args:
        mean: the mean or the share.
        low, high: the ends of the interval; both are None if there is no interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.3f} (no interval)"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float] | np.ndarray, clusters: np.ndarray | None = None) -> Estimate:
    """Return the mean of independent values with Student's 95 % interval.

    The interval may go beyond the range of the values, because to cut it would hide how little a few values can say.
    There is no interval if there are too few values or clusters, or if all values are equal, since such values do not
    show how much chance changes them.

    Args:
        values: a value for each question, problem or seed, (values,).
        clusters: a label for each value, (values,), if some values share a source; see `compute_squared_error`.

    Raises:
        ValueError: there is no value, or a value is not finite.
    """
    values = _check_values(values)
    mean = float(values.mean())
    error = float(np.sqrt(compute_squared_error(values, clusters)))
    has_too_few_units = explain_missing_interval(len(values), clusters) is not None
    if has_too_few_units or error <= ROUNDING * abs(mean):
        return Estimate(mean)
    freedom = count_effective_units(len(values), clusters) - 1
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Estimate(mean=mean, low=mean - half_width, high=mean + half_width)


def _check_values(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return values as float64, (values,); raise ValueError if there is none or if one is not finite."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"finite values in one dimension are needed, at least one; got an array of {values.shape}")
    return values


def estimate_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean over trainings as `estimate` does, but without an interval if they are fewer than `MIN_SEEDS`.

    Args:
        values: a value for each training seed.

    Raises:
        ValueError: there is no value, or a value is not finite.
    """
    values = _check_values(values)
    if len(values) < MIN_SEEDS:
        return Estimate(float(values.mean()))
    return estimate(values)


def estimate_share(count: int, number_of_units: int) -> Estimate:
    """Return a share with its exact 95 % interval, which exists for shares of 0 and 1 too.

    Source: Clopper and Pearson, The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial
    (Biometrika 26, 1934).

    Args:
        count: how many of the units something happened to.
        number_of_units: how many units there are, at least 1. They must be independent.
    """
    interval = stats.binomtest(count, number_of_units).proportion_ci(CONFIDENCE, method="exact")
    return Estimate(mean=count / number_of_units, low=float(interval.low), high=float(interval.high))
