"""The committed tables: they load, their presets exist, their means are those of their numbers. A definition that does
not fit together is refused.

That the numbers are the papers' is not tested here: there is no second source of them; that they and the
tables stay is (tests/run/test_presets.py).
"""

import re
from pathlib import Path

import pytest
import yaml

from tests.papers.tables.tables import made_table
from verl_clipx.papers.tables.definition import MEAN_OF, columns_used, load_table, table_names
from verl_clipx.papers.tables.presets import preset_names

ROOT = Path(__file__).parents[3]
TABLES = {name: load_table(name) for name in table_names()}

# Nobody printed numbers for them before.
OWN = {"cpu_small", "reversal"}

UNITS = ("percent", "fraction", "seconds", "number")

# What the papers print is rounded.
ROUNDING = {1: 0.05, 2: 0.005}
EPSILON = 1e-9


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_whole(name):
    """Its presets exist, every field has a comment, labels and counts are what a reader takes them for."""
    table = TABLES[name]
    presets = {source.preset for source, _ in table.sources() if source.preset}
    measured_on = {preset for row in table.rows for preset in row.measured_on.values()}
    assert presets and presets | measured_on <= {*preset_names()}
    lines = (ROOT / "verl_clipx" / "papers" / "tables" / "definitions" / f"{name}.yaml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line[:1].isalpha()]
    assert keys and all(lines[number - 1].startswith("#") for number in keys)
    assert all(row.expected for row in table.rows) == (name not in OWN)
    assert table.unit in UNITS
    columns, rows = [column.name for column in table.columns], [row.name for row in table.rows]
    assert len({*columns}) == len(columns) and len({*rows}) == len(rows)
    used = {
        one for row in table.rows for column in table.columns for one in columns_used(table.measure_of(row, column))
    }
    assert used | {one for note in table.footnotes for one in note.columns} <= {*columns}
    settings = table.benchmarks.values()
    assert all(isinstance(one["questions"], int) and one["questions"] > 0 for one in settings)
    origins = [*table.origins.values(), *(one["origin"] for one in settings if "origin" in one)]
    assert all(re.fullmatch(r"\[(paper|script|choice)\] .+", origin) for origin in origins)


def test_means_over_columns_are_the_papers_averages():
    of_columns = [(table, row, one) for table in TABLES.values() for row in table.rows for one in table.columns]
    cells = [cell for cell in of_columns if MEAN_OF in cell[2].measure and cell[0].expected(*cell[1:]) is not None]
    assert len(cells) > 50
    for table, row, column in cells:
        parts = [table.expected(row, table.column(name)) for name in column.measure[MEAN_OF]]
        if None not in parts:
            off = abs(sum(parts) / len(parts) - table.expected(row, column))
            assert off <= ROUNDING[table.digits] + EPSILON, (table.name, row.name, column.name)


BROKEN = yaml.safe_load(Path(__file__).with_name("broken_definitions.yaml").read_text())


@pytest.mark.parametrize(("message", "changes"), BROKEN.items())
def test_definitions_that_do_not_fit_are_refused(message, changes):
    with pytest.raises(ValueError, match="table small") as caught:
        made_table("definition", **changes)
    assert message in str(caught.value)


def test_means_and_gains_are_measurable_only_if_their_parts_are():
    columns = [
        {"name": "near", "measure": {"benchmark": "b", "metric": "avg@2"}},
        {"name": "mean", "measure": {"mean_of": ["near"]}},
        {"name": "gain", "measure": {"gain_of": "mean"}},
    ]
    x, y = {"name": "x", "preset": "p/x"}, {"name": "y", "preset": "p/y", "baseline": "x"}
    table = made_table("definition", columns=columns, rows=[x, y, {"name": "q", "quoted": "because"}])
    mean, gain, row = table.column("mean"), table.column("gain"), table.row("x")
    assert table.is_measurable(table.row("y"), gain) and not table.is_measurable(row, gain)
    assert table.is_measurable(row, mean) and table.source_of(row, mean) is None
    assert not table.is_measurable(table.row("q"), mean)
