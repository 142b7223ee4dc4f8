"""A small table, letter by letter, with and without results, and what the commands refuse."""

import json
from dataclasses import replace
from pathlib import Path

from tests.analysis.runs.commands import clipx
from tests.messages import assert_names
from tests.papers.tables.tables import make_table
from verl_clipx.papers.tables.collect import hash_of_definition
from verl_clipx.papers.tables.definition import Footnote, load_table
from verl_clipx.papers.tables.render import cells_of, render

TABLE = make_table("render")
GOLDEN = Path(__file__).with_name("golden")
RESULTS = json.loads((GOLDEN / "results.json").read_text()) | {"definition": hash_of_definition(TABLE)}


def test_the_whole_table_letter_by_letter():
    assert render(TABLE, RESULTS) == (GOLDEN / "small.markdown").read_text()


def test_without_results_no_cell_has_a_measured_number():
    text = render(TABLE, None)
    assert "| x | 40.0 | 50.0 |\n| y\\|z |  |  |\n" in text and "**" not in text
    assert "The paper's numbers; nothing has been measured." in text


def test_each_mark_has_its_footnote_and_those_about_the_whole_table_have_none():
    of_a_row = [Footnote(f"Note {number}.", rows=("x",)) for number in range(27)]
    of_the_table = Footnote("The whole.")
    text = render(replace(TABLE, footnotes=(*of_a_row, of_the_table)), None)
    assert "| x<sup>a</sup>" in text and "<sup>z</sup> Note 25." in text and "<sup>aa</sup> Note 26." in text
    assert "\nThe whole.\n" in text


# Changes to a cell of results.json.
OF_ONE_SEED = {"low": 6.0, "high": 8.0, "interval": "questions"}
OF_A_MODEL_THAT_IS_NOT_TRAINED = {**OF_ONE_SEED, "mean": 7.0, "difference": None, "seeds": []}


def render_with_changes(changes: dict[int, dict]) -> str:
    """Return the table with some cells of results.json changed, by their places."""
    cells = [cell | changes.get(place, {}) for place, cell in enumerate(RESULTS["cells"])]
    return render(TABLE, RESULTS | {"cells": cells})


def test_different_numbers_of_seeds_are_in_the_cells():
    text = render_with_changes({2: OF_ONE_SEED})
    assert "**38.8 [37.0, 40.5] (\u22121.2), 2 seeds**" in text
    assert "**7.0 [6.0, 8.0], 1 seed**" in text


def test_a_model_that_is_not_trained_has_no_number_of_seeds():
    text = render_with_changes({2: OF_A_MODEL_THAT_IS_NOT_TRAINED})
    assert "**7.0 [6.0, 8.0]**" in text
    assert "0 seeds" not in text
    assert_names(text, "95 % intervals of 1 cell: Student's t over questions")


def test_a_kind_of_interval_has_one_line_for_cells_with_and_without_a_training():
    text = render_with_changes({2: OF_ONE_SEED, 3: OF_A_MODEL_THAT_IS_NOT_TRAINED})
    assert "**7.0 [6.0, 8.0], 1 seed** | **7.0 [6.0, 8.0]** |" in text
    assert "0 seeds" not in text
    assert_names(text, "95 % intervals of 2 cells: Student's t over questions")


def test_what_rounds_to_zero_has_no_minus():
    assert "(+0.0)" in render_with_changes({0: {"mean": 39.99, "difference": -0.01}})


def test_a_model_that_is_only_evaluated_is_no_training_and_has_no_commit():
    evaluated = {"preset": None, "seed": None, "commit": None, "versions": {"vllm": "0.12"}}
    text = render(TABLE, RESULTS | {"runs": [RESULTS["runs"][0], evaluated]})
    assert "\nTrainings: 1, seeds 1.\n\nVersions: verl 0.9.1, vllm 0.12.\n\nCommit of 1 training: abc.\n" in text
    assert "not recorded" not in text
    assert "Commit of" not in render(TABLE, RESULTS | {"runs": [evaluated]})


def test_a_cell_that_was_not_measured_has_no_measured_number_in_json():
    cells = {(cell["row"], cell["column"]): cell["measured"] for cell in cells_of(TABLE, RESULTS)}
    measured = {(cell["row"], cell["column"]): cell for cell in RESULTS["cells"] if "mean" in cell}
    assert cells == {("x", "two_2"): None} | measured
    assert {(cell["row"], cell["measured"]) for cell in cells_of(TABLE, None)} == {("x", None)}


def test_the_command_writes_the_table_into_a_file(tmp_path):
    out = tmp_path / "table.md"
    clipx("papers", "table", "render", "dgpo_table4", "--runs", tmp_path, "--out", out)
    assert "DGPO | 52.7 | 73.0 | 62.0 | 77.9 | 56.7 | 70.4" in out.read_text()


def test_the_command_refuses_results_of_an_older_definition(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(RESULTS | {"table": "dgpo_table4"}))
    output = clipx("papers", "table", "render", "dgpo_table4", "--results", path, code=1)
    assert "the table's definition has changed since" in output


def test_the_command_takes_results_of_the_present_definition(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS | {"definition": hash_of_definition(load_table("dgpo_table4"))}))
    clipx("papers", "table", "render", "dgpo_table4", "--results", path)
