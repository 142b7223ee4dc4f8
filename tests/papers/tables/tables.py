"""A small table for tests, and the command: each test says what it looks at, the rest is here."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from verl_clipx.cli import app
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


def clipx(*words: object, code: int = 0) -> str:
    """Run the command, which must end with this exit code; its output without line breaks."""
    done = CliRunner(env={"COLUMNS": "220"}).invoke(app, list(map(str, words)))
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    return " ".join(done.output.split())
