"""Measures the bounds that an ACPO run used, for the fixed bounds of ACPO's ablations (its Table 3).

A line of `clipx papers table plan acpo_table3` runs it:

    python -m verl_clipx.papers.tables.measured_bounds METRICS average
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

from pandas import DataFrame

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run_log import read_run_log
from verl_clipx.losses.base.method import NODE


class MeasuredBounds(NamedTuple):
    """Epsilon of ACPO over a run.

    Args:
        highest: the largest epsilon of any bin with tokens in any update.
        average: epsilon averaged over all tokens of the run.
    """

    highest: float
    average: float

    @property
    def overrides(self) -> dict[str, list[str]]:
        """The overrides of +clipx=grpo for the ablations with the highest and with the average epsilon."""
        return {
            "highest": [f"clipx.clip_high={1 + self.highest:.6g}"],
            "average": [
                f"clipx.clip_low={max(1 - self.average, 0):.6g}",
                f"clipx.clip_high={1 + self.average:.6g}",
            ],
        }


def measured_bounds(log: DataFrame) -> MeasuredBounds:
    """Return the highest and the average epsilon of an ACPO run.

    Args:
        log: the run's metrics, a row a step, from `read_run_log`.

    Returns:
        Both over all steps. In the average, each step is weighted by its tokens.

    Raises:
        ValueError: the log has no epsilons, as it is not of an ACPO run, or they give no finite bounds.
    """
    names = [keys.EPSILON_HIGHEST, keys.EPSILON_AVERAGE]
    missing = [name for name in names if name not in log]
    if missing:
        raise ValueError(f"the log has no {missing[0]}: give the metrics of a run with +{NODE}=acpo.")
    rows = log.dropna(subset=names)
    tokens = rows[keys.find_bin_keys("count", log)].sum(axis=1)
    average = (rows[keys.EPSILON_AVERAGE] * tokens).sum() / tokens.sum()
    bounds = MeasuredBounds(float(rows[keys.EPSILON_HIGHEST].max()), float(average))
    if not (math.isfinite(bounds.highest) and math.isfinite(bounds.average)):
        raise ValueError(
            f"the log gives no finite bounds: highest epsilon {bounds.highest:g}, average {bounds.average:g} over "
            f"{len(rows)} steps with both. Its steps need finite epsilons and token counts ({keys.COUNTS})."
        )
    return bounds


if __name__ == "__main__":
    try:
        print(*measured_bounds(read_run_log(Path(sys.argv[1]))).overrides[sys.argv[2]])
    except (OSError, ValueError) as error:
        sys.exit(str(error))
