"""A small table, letter by letter, with and without results, and what the commands refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis.runs.commands import clipx
from tests.papers.tables.tables import made_table
from verl_clipx.papers.tables.collect import hash_of_definition
from verl_clipx.papers.tables.definition import Footnote, load_table
from verl_clipx.papers.tables.render import cells_of, render

TABLE = made_table("render")


GOLDEN = Path(__file__).with_name("golden")
RESULTS = json.loads((GOLDEN / "results.json").read_text()) | {"definition": hash_of_definition(TABLE)}


def test_golden():
    assert render(TABLE, RESULTS) == (GOLDEN / "small.markdown").read_text()


def test_without_results_no_cell_has_a_measured_number():
    text = render(TABLE, None)
    assert "| x | 40.0 | 50.0 |\n| y\\|z |  |  |\n" in text and "**" not in text
    assert "The paper's numbers; nothing has been measured." in text


def test_each_mark_has_its_footnote_and_those_about_the_whole_table_have_none():
    notes = [Footnote(f"Note {number}.", rows=("x",)) for number in range(27)] + [Footnote("The whole.")]
    text = render(replace(TABLE, footnotes=tuple(notes)), None)
    assert "| x<sup>a</sup>" in text and "<sup>z</sup> Note 25." in text and "<sup>aa</sup> Note 26." in text
    assert "\nThe whole.\n" in text


OVER_QUESTIONS = {"low": 6.0, "high": 8.0, "interval": "questions"}
OF_A_MODEL = {**OVER_QUESTIONS, "mean": 7.0, "difference": None, "seeds": []}


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        # Different numbers of seeds are said in the cells.
        ({2: OVER_QUESTIONS}, ["**38.8 [37.0, 40.5] (\u22121.2), 2 seeds**", "**7.0 [6.0, 8.0], 1 seed**"]),
        # A model that is only evaluated has no seed.
        ({2: OF_A_MODEL}, ["**7.0 [6.0, 8.0]**", "95 % intervals of 1 cell: Student's t over qu"]),
        ({2: OVER_QUESTIONS, 3: OF_A_MODEL}, ["**7.0 [6.0, 8.0], 1 seed** | **7.0 [6.0, 8.0]** |"]),
        # One line for one kind of interval, with and without a training.
        ({2: OVER_QUESTIONS, 3: OF_A_MODEL}, ["95 % intervals of 2 cells: Student's t over questions."]),
        # What rounds to zero has no minus.
        ({0: {"mean": 39.99, "difference": -0.01}}, ["(+0.0)"]),
    ],
)
def test_the_texts_of_cells(changes, texts):
    cells = [cell | changes.get(place, {}) for place, cell in enumerate(RESULTS["cells"])]
    text = render(TABLE, RESULTS | {"cells": cells})
    assert all(one in text for one in texts) and "0 seeds" not in text


def test_a_cell_that_was_not_measured_has_no_measured_number_in_json():
    cells = {(cell["row"], cell["column"]): cell["measured"] for cell in cells_of(TABLE, RESULTS)}
    measured = {(cell["row"], cell["column"]): cell for cell in RESULTS["cells"] if "mean" in cell}
    assert cells == {("x", "two_2"): None} | measured
    assert {(cell["row"], cell["measured"]) for cell in cells_of(TABLE, None)} == {("x", None)}


def test_the_command_writes_files_and_refuses_results_of_an_older_definition(tmp_path):
    path, out = tmp_path / "old.json", tmp_path / "table.md"
    clipx("papers", "table", "render", "dgpo_table4", "--runs", tmp_path, "--out", out)
    assert "DGPO | 52.7 | 73.0 | 62.0 | 77.9 | 56.7 | 70.4" in out.read_text()
    words = ("papers", "table", "render", "dgpo_table4", "--results", path)
    path.write_text(json.dumps(RESULTS | {"table": "dgpo_table4"}))
    assert "the table's definition has changed since" in clipx(*words, code=1)
    path.write_text(json.dumps(RESULTS | {"definition": hash_of_definition(load_table("dgpo_table4"))}))
    clipx(*words)
