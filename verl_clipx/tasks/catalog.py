"""Every data set of every task, by name."""

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module

from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.tasks.definition import DatasetDefinition

TASKS = ("countdown", "hitab", "knights_and_knaves", "math", "reasoning_gym", "reversal")


@lru_cache(maxsize=1)
def definitions() -> dict[str, DatasetDefinition]:
    """Return every data set by its name, in the order of `TASKS`."""
    return collect(
        definition for task in TASKS for definition in import_module(f"verl_clipx.tasks.{task}.dataset").DATASETS
    )


def collect(found: Iterable[DatasetDefinition]) -> dict[str, DatasetDefinition]:
    """Return data sets by their names.

    Raises:
        ValueError: if two have one name; the message gives it.
    """
    by_name: dict[str, DatasetDefinition] = {}
    for definition in found:
        if definition.name in by_name:
            tasks = f"{by_name[definition.name].task} and {definition.task}"
            raise ValueError(f"data set {definition.name!r} is defined by both {tasks}; rename one of them")
        by_name[definition.name] = definition
    return by_name


def definition_named(name: str) -> DatasetDefinition:
    """Return the data set of that name.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    try:
        return definitions()[name]
    except KeyError:
        hint = did_you_mean(name, definitions())
        raise ValueError(f"data set {name!r} is unknown.{hint} There are {', '.join(definitions())}.") from None
