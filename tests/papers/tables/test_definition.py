"""The committed tables: they load, their presets exist, their means are those of their numbers. A definition that does
not fit together is refused.

That the numbers are the papers' is not tested here: there is no second source of them; that they and the
tables stay is (tests/run/test_presets.py).
"""

import re
from pathlib import Path

import pytest
import yaml

from tests.papers.tables.tables import make_table
from verl_clipx.papers.tables.definition import MEAN_OF, columns_used, load_table, table_names
from verl_clipx.papers.tables.presets import preset_names

ROOT = Path(__file__).parents[3]
TABLES = {name: load_table(name) for name in table_names()}


@pytest.mark.parametrize("name", TABLES)
def test_every_preset_of_a_table_exists(name):
    table = TABLES[name]
    trained = {source.preset for source, _ in table.sources() if source.preset}
    measured_on = {preset for row in table.rows for preset in row.measured_on.values()}
    assert trained
    assert trained | measured_on <= {*preset_names()}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_a_table_has_a_comment_above_it(name):
    lines = (ROOT / "verl_clipx" / "papers" / "tables" / "definitions" / f"{name}.yaml").read_text().splitlines()
    fields = [number for number, line in enumerate(lines) if line[:1].isalpha()]
    assert fields
    assert [lines[number] for number in fields if not lines[number - 1].startswith("#")] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_the_papers_numbers_but_of_our_own_tables(name):
    # Nobody printed numbers for these two before.
    is_own = name in ("cpu_small", "reversal")
    assert all(row.expected for row in TABLES[name].rows) == (not is_own)


@pytest.mark.parametrize("name", TABLES)
def test_labels_are_unique_and_those_that_are_named_exist(name):
    table = TABLES[name]
    columns = [column.name for column in table.columns]
    rows = [row.name for row in table.rows]
    assert len({*columns}) == len(columns)
    assert len({*rows}) == len(rows)
    columns_of_measures = set()
    for row in table.rows:
        for column in table.columns:
            columns_of_measures.update(columns_used(table.measure_of(row, column)))
    columns_of_footnotes = {column for footnote in table.footnotes for column in footnote.columns}
    assert columns_of_measures | columns_of_footnotes <= {*columns}


@pytest.mark.parametrize("name", TABLES)
def test_units_counts_and_origins_are_what_a_reader_takes_them_for(name):
    table = TABLES[name]
    assert table.unit in ("percent", "fraction", "seconds", "number")
    origins = [*table.origins.values()]
    for settings in table.benchmarks.values():
        assert isinstance(settings["questions"], int)
        assert settings["questions"] > 0
        if "origin" in settings:
            origins.append(settings["origin"])
    assert [origin for origin in origins if not re.fullmatch(r"\[(paper|script|choice)\] .+", origin)] == []


# By the number of decimals, the largest error of a number that a paper rounded.
ROUNDING = {1: 0.05, 2: 0.005}


def test_means_over_columns_are_the_papers_averages():
    compared = 0
    for table in TABLES.values():
        for row in table.rows:
            for column in table.columns:
                printed = table.expected(row, column)
                if MEAN_OF not in column.measure or printed is None:
                    continue
                compared += 1
                parts = [table.expected(row, table.column(name)) for name in column.measure[MEAN_OF]]
                if None not in parts:
                    mean = sum(parts) / len(parts)
                    assert abs(mean - printed) <= ROUNDING[table.digits] + 1e-9, (table.name, row.name, column.name)
    assert compared > 50


BROKEN = yaml.safe_load(Path(__file__).with_name("broken_definitions.yaml").read_text())


@pytest.mark.parametrize(("message", "changes"), BROKEN.items())
def test_definitions_that_do_not_fit_are_refused(message, changes):
    with pytest.raises(ValueError, match="table small") as raised:
        make_table("definition", **changes)
    assert message in str(raised.value)


def test_means_and_gains_are_measurable_only_if_their_parts_are():
    columns = [
        {"name": "near", "measure": {"benchmark": "b", "metric": "avg@2"}},
        {"name": "mean", "measure": {"mean_of": ["near"]}},
        {"name": "gain", "measure": {"gain_of": "mean"}},
    ]
    rows = [
        {"name": "trained", "preset": "p/x"},
        {"name": "with a baseline", "preset": "p/y", "baseline": "trained"},
        {"name": "quoted", "quoted": "because"},
    ]
    table = make_table("definition", columns=columns, rows=rows)
    mean = table.column("mean")
    gain = table.column("gain")
    assert table.is_measurable(table.row("trained"), mean)
    assert table.source_of(table.row("trained"), mean) is None
    assert not table.is_measurable(table.row("quoted"), mean)
    assert table.is_measurable(table.row("with a baseline"), gain)
    assert not table.is_measurable(table.row("trained"), gain)
