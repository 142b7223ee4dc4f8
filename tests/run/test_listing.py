"""What follows from the classes: docs/methods.md's table, and `clipx methods observe`.

Covers: the page has the table that `clipx methods --markdown` prints, and every group that chooses a method is in it;
what `clipx methods` makes of a group's name and of observe. Not covered: what the rows say, and the other pages
(tests/methods/test_what_a_method_needs.py).
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_clipx.base.refusal import Refusal
from verl_clipx.cli import app
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.run.groups import group_settings
from verl_clipx.run.listing import listed, markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
START, END = "<!-- clipx methods --markdown -->\n", "\n<!-- end -->"


def test_the_page_has_the_table_that_the_command_prints():
    table = PAGE.read_text().split(START)[1].split(END)[0]
    assert table == markdown_table(), "clipx methods --markdown prints the table that the page should have"


def test_every_group_with_a_method_has_its_place():
    names = [path.stem for path in (configs_folder() / "clipx").glob("*.yaml")]
    chosen = [name for name in names if group_settings(name).get("method")]
    assert len(chosen) > 15
    table = markdown_table()
    assert not [name for name in chosen if f"`{name}`" not in table]


@pytest.mark.parametrize(("group", "method"), [("dapo", "grpo"), ("acpo_reference", "acpo"), ("clipx_acpo", "acpo")])
def test_a_group_is_described_by_its_method(group, method):
    (found,) = listed(group)
    assert found["name"] == method


@pytest.mark.parametrize("name", ["base", "custom", "../clipx/dapo", ""])
def test_what_is_neither_method_nor_a_methods_group_is_unknown(name):
    with pytest.raises(Refusal) as raised:
        listed(name)
    assert raised.value.value == name


def test_observe_is_described_with_its_one_parameter(monkeypatch):
    monkeypatch.setattr("verl_clipx.cli.console.width", 200)
    shown = CliRunner().invoke(app, ["methods", "observe"])
    assert shown.exit_code == 0, shown.output
    for words in ("observe: verl's own loss, our metrics", "+clipx=observe", "compile", "auto, true or false"):
        assert words in shown.output
    refused = CliRunner().invoke(app, ["methods", "observed"])
    assert refused.exit_code == 1 and "Did you mean observe?" in refused.output.replace("\n", " ")
