"""Base rates: shares in the logs of healthy runs, to compare a run's own with. benchmarks/diagnosis.py counts them."""

from functools import cache
from pathlib import Path

import pandas

from verl_clipx.common.files import read_json_object
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

PATH = Path(__file__).with_name("base_rates.json")

CLIPPED = "clipped on either side"
OUTSIDE = "gradient mass that soft clipping keeps outside the bounds"
BEYOND = "gradient mass outside the bounds, pulled back or kept"

# Share to the metrics that add up to it, and to those whose sum it is a part of; without the latter, the former are
# shares themselves.
_SHARES = (keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.PG_CLIPPED, *keys.HEALTH_SHARES)
MEASURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    CLIPPED: ((keys.CLIPPED_LOW, keys.CLIPPED_HIGH), ()),
    OUTSIDE: ((keys.MASS["LN"], keys.MASS["HP"]), tuple(keys.MASS.values())),
    BEYOND: (tuple(key for region, key in keys.MASS.items() if region != "M"), tuple(keys.MASS.values())),
    **{key: ((key,), ()) for key in _SHARES},
}


def of_run(run: Run, name: str) -> pandas.Series:
    """A share of MEASURES by step; empty if a run does not log it, or has nothing outside its bounds."""
    parts, whole = ([run.values(key) for key in names] for names in MEASURES[name])
    share = pandas.concat(parts, axis=1, join="inner").sum(axis=1)
    if whole:
        total = pandas.concat(whole, axis=1, join="inner").sum(axis=1)
        share = (share / total)[total > 0] if (share > 0).any() else share.iloc[:0]
    return share[share.index > 0]


@cache
def rates() -> dict[str, dict[str, float]]:
    """Share to `logs`, the number of healthy logs with it, and to `low` and `high`, the ends of the middle 80 %."""
    return read_json_object(PATH, {str: {"logs": int, "low": int | float, "high": int | float}})
