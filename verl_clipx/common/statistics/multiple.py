"""Many comparisons at once."""

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values: rejecting those below 5 % makes one false rejection or more in at most 5 % of families.

    In ascending order the i-th of n, from 0, is multiplied by n - i; none is smaller than the one before, none above 1.
    Holm, A Simple Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: of one family; None, where there is none, is no member.

    Returns:
        In the same order, None where there was none.
    """
    known = np.array([one for one in p_values if one is not None], dtype=np.float64)
    order = np.argsort(known, kind="stable")
    known[order] = np.maximum.accumulate(known[order] * np.arange(len(order), 0, -1))
    adjusted = iter(np.minimum(known, 1.0).tolist())
    return [None if one is None else next(adjusted) for one in p_values]
