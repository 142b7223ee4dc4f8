"""Every data set of every task, by name; sets.yaml lists them."""

from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any

import yaml

from verl_clipx.losses.base.refusal import did_you_mean
from verl_clipx.papers.tasks.definition import DatasetDefinition

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
    module = import_module(f"verl_clipx.papers.tasks.{task}.dataset")
    of_math = task == "math"
    builder = module.rows_of(name, entry.get("hub"), **settings or {}) if of_math else getattr(module, rows)
    return DatasetDefinition(name=name, task=task, rows=builder, **entry)
