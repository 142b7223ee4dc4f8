"""Base rates: shares in the logs of healthy runs, to compare a run's own with. benchmarks/diagnosis.py counts them."""

from functools import cache
from pathlib import Path

import pandas

from verl_clipx.common.files import read_json_object
from verl_clipx.common.sentences import percent
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

PATH = Path(__file__).with_name("base_rates.json")

CLIPPED = "clipped on either side"
OUTSIDE = "gradient mass that soft clipping keeps outside the bounds"
BEYOND = "gradient mass outside the bounds, pulled back or kept"

# Share to the metrics that add up to it, and to those whose sum it is a part of; without the latter, the former are
# shares themselves.
MEASURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    CLIPPED: ((keys.CLIPPED_LOW, keys.CLIPPED_HIGH), ()),
    OUTSIDE: ((keys.MASS["LN"], keys.MASS["HP"]), tuple(keys.MASS.values())),
    BEYOND: (tuple(key for region, key in keys.MASS.items() if region != "M"), tuple(keys.MASS.values())),
    **{
        key: ((key,), ())
        for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.PG_CLIPPED, keys.IN_M, *keys.HEALTH_SHARES)
    },
}


def of_run(run: Run, name: str) -> pandas.Series:
    """A share of MEASURES by step; empty if a run does not log it, or has nothing outside its bounds."""
    parts, whole = ([run.values(key) for key in names] for names in MEASURES[name])
    found = pandas.concat(parts, axis=1, join="inner").sum(axis=1)
    if whole:
        total = pandas.concat(whole, axis=1, join="inner").sum(axis=1)
        found = (found / total)[total > 0] if (found > 0).any() else found.iloc[:0]
    return found[found.index > 0]


def usual(name: str) -> str:
    """The note behind a share: between which values the middle 80 % of healthy runs lie, or that this is unknown.

    Args:
        name: a key of MEASURES.
    """
    found = rates().get(name)
    if found is None:
        return " (usual: unknown, no healthy log here has it)"
    low, high = (percent(found[side]) for side in ("low", "high"))
    return f" (usual: {low if low == high else f'{low} to {high}'}, {found['logs']} healthy logs)"


@cache
def rates() -> dict[str, dict[str, float]]:
    """Share to `logs`, the number of healthy logs with it, and to `low` and `high`, the ends of the middle 80 %."""
    return read_json_object(PATH, {str: {"logs": int, "low": int | float, "high": int | float}})
