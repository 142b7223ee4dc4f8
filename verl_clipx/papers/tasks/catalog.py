"""Every data set of every task, by name."""

from functools import lru_cache
from importlib import import_module

from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.papers.tasks.definition import DatasetDefinition

TASKS = ("countdown", "hitab", "knights_and_knaves", "math", "reversal", "sums")


@lru_cache(maxsize=1)
def definitions() -> dict[str, DatasetDefinition]:
    """Return all data sets by name, in the order of `TASKS`."""
    of_tasks = (import_module(f"verl_clipx.papers.tasks.{task}.dataset").DATASETS for task in TASKS)
    return {one.name: one for sets in of_tasks for one in sets}


def definition_named(name: str) -> DatasetDefinition:
    """Return the data set of that name.

    Raises:
        ValueError: there is none; the message lists the names of all.
    """
    try:
        return definitions()[name]
    except KeyError:
        hint = did_you_mean(name, definitions())
        raise ValueError(f"data set {name!r} is unknown.{hint} There are {', '.join(definitions())}.") from None
