"""Hierarchical tables as text, by hand on two invented tables in the release's schema.

Not covered: the release's 3,597 tables, which are not on this machine.
"""

import json
from pathlib import Path

import pytest

from verl_clipx.papers.tasks.hitab.table import table_text

FOLDER = Path(__file__).parent / "fixtures" / "release" / "data" / "tables" / "raw"


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_paths_of_columns_and_rows():
    assert table_text(read("900")).splitlines() == [
        "ships and cargo handled in two invented harbours, by year",
        "",
        "| harbour | 2019 > ships | 2019 > cargo (tonnes) | 2020 > ships | 2020 > cargo (tonnes) |",
        "| --- | --- | --- | --- | --- |",
        "| north coast > grimmel | 40 | 1,200.5 | 50 | 1,500 |",
        "| north coast > ostholm | 60 | 2,400 | 75 | 2,500 |",
        "| total | 100 | 3,600.5 | 125 | 4,000 |",
    ]


def test_two_columns_of_row_headers_and_a_bar_in_a_cell():
    assert table_text(read("901_town")).splitlines()[2:] == [
        "| age > means | men | women |",
        "| --- | --- | --- |",
        "| 15 to 34 > bicycle | 31.5 | 33.0 |",
        "| 15 to 34 > on foot / by ferry | 12.0 | 14.5 |",
        "| 35 and over > bicycle | 22.0 | .. |",
    ]


def test_lines_outside_the_trees_are_headed_by_their_header_cells():
    table = read("900")
    table["top_root"]["children"] = table["left_root"]["children"] = []
    lines = table_text(table).splitlines()
    assert lines[2] == "| harbour | 2019 > ships | 2019 > cargo (tonnes) | 2020 > ships | 2020 > cargo (tonnes) |"
    assert lines[4] == "| north coast |  |  |  |  |"
    assert lines[5] == "| grimmel | 40 | 1,200.5 | 50 | 1,500 |"


def test_a_heading_row_with_values_stays():
    table = read("900")
    table["texts"][2][1] = 110.0
    assert table_text(table).splitlines()[4] == "| north coast | 110 |  |  |  |"


def test_ragged_rows_and_line_ends_in_cells():
    table = read("900")
    table["texts"][5] = ["grand\n total", None]
    assert table_text(table).splitlines()[-1] == "| grand total |  |  |  |  |"


@pytest.mark.parametrize("key", ["title", "texts", "merged_regions", "top_root", "left_header_columns_num"])
def test_missing_keys_are_named(key):
    table = read("900")
    del table[key]
    with pytest.raises(ValueError, match=rf"^table: {key}=None is not of type "):
        table_text(table)


def test_empty_table_is_refused():
    with pytest.raises(ValueError, match="texts is empty"):
        table_text(read("900") | {"texts": []})
