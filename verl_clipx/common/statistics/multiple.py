"""Many comparisons at once."""

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below 5 % makes one false rejection or more in at most 5 % of families.

    In ascending order the i-th of n, from 0, is multiplied by n - i; none is smaller than the one before, none above 1.
    Holm, A Simple Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: of one family.

    Returns:
        In the same order.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    return np.minimum(adjusted, 1.0).tolist()
