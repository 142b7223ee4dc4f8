"""Finds the data sets of all tasks by name; sets.yaml lists them."""

from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any

import yaml

from verl_clipx.losses.base.refusal import did_you_mean
from verl_clipx.papers.tasks.definition import DatasetDefinition, RowBuilder

TASKS = ("countdown", "hitab", "knights_and_knaves", "math", "reversal", "sums")


@lru_cache(maxsize=1)
def definitions() -> dict[str, DatasetDefinition]:
    """Return all data sets by name, in the order of sets.yaml."""
    sets = yaml.safe_load(files("verl_clipx.papers.tasks").joinpath("sets.yaml").read_text(encoding="utf-8"))
    return {name: _define(name, **entry) for name, entry in sets.items()}


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


def _define(name: str, task: str, rows: str = "rows", settings: Any = None, **entry: Any) -> DatasetDefinition:
    """Return the definition of a data set.

    Args:
        name: the name of the data set.
        task, rows, settings: as sets.yaml explains them.
        **entry: the other fields of `DatasetDefinition`.
    """
    builder = _find_builder(name, task, rows, settings or {}, entry.get("hub"))
    return DatasetDefinition(name=name, task=task, rows=builder, **entry)


def _find_builder(name: str, task: str, rows: str, settings: dict[str, Any], hub: str | None) -> RowBuilder:
    """Return the function that yields the rows of a data set; the arguments are as for `_define`."""
    module = import_module(f"verl_clipx.papers.tasks.{task}.dataset")
    if task == "math":
        # One function makes those of all sets of mathematics.
        return module.rows_of(name, hub, **settings)
    return getattr(module, rows)
