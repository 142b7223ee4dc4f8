"""A small table for tests: each test says what it looks at, the rest is here."""

from pathlib import Path

import yaml

from verl_clipx.papers.tables.definition import Table, build_table

HEAD = {
    "title": "t",
    "source": "s",
    "metric": "m",
    "unit": "percent",
    "digits": 1,
    "hardware": "cpu",
    "nodes": 1,
    "seeds": [1],
    "data": "data",
}


def made_table(name: str, **changes) -> Table:
    """The table small of a file of made_tables, with changes."""
    return small_table(Path(__file__).with_name("made_tables").joinpath(f"{name}.yaml").read_text(), **changes)


def small_table(text: str, **changes) -> Table:
    """A table called small.

    Args:
        text: YAML of its entries beyond the head, or in place of the head's.
        changes: entries that win over both.
    """
    return build_table("small", HEAD | yaml.safe_load(text) | changes)
