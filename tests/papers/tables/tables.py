"""A small table for tests: each test says what it looks at, the rest is here."""

from pathlib import Path

import yaml

from verl_clipx.papers.tables.definition import Table, build_table

ENTRIES_OF_ALL = {
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


def make_table(name: str, **changes) -> Table:
    """Return the table small of a file of made_tables, with changes."""
    return build_small_table(Path(__file__).with_name("made_tables").joinpath(f"{name}.yaml").read_text(), **changes)


def build_small_table(text: str, **changes) -> Table:
    """Return a table called small.

    Args:
        text: YAML of its entries beyond `ENTRIES_OF_ALL`, or in place of those.
        changes: entries that win over both.
    """
    return build_table("small", ENTRIES_OF_ALL | yaml.safe_load(text) | changes)
