"""What follows from the classes: the list of methods, and `clipx methods observe`.

Covers: every group that chooses a method is in the list; what `clipx methods` makes of a group's name and of observe.
Not covered: what the rows say, and the pages (tests/methods/test_what_a_method_needs.py).
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_clipx.base.refusal import Refusal
from verl_clipx.cli import app
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.run.groups import group_settings
from verl_clipx.run.listing import describe_methods, markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_every_group_with_a_method_has_its_place():
    names = [path.stem for path in (configs_folder() / "clipx").glob("*.yaml")]
    chosen = [name for name in names if group_settings(name).get("method")]
    assert len(chosen) > 15
    table = markdown_table()
    assert not [name for name in chosen if f"`{name}`" not in table]


@pytest.mark.parametrize(("group", "method"), [("dapo", "grpo"), ("acpo_reference", "acpo"), ("clipx_acpo", "acpo")])
def test_a_group_is_described_by_its_method(group, method):
    (result,) = describe_methods(group)
    assert result["name"] == method


@pytest.mark.parametrize("name", ["base", "custom", "../clipx/dapo", ""])
def test_what_is_neither_method_nor_a_methods_group_is_unknown(name):
    with pytest.raises(Refusal) as raised:
        describe_methods(name)
    assert raised.value.value == name


def test_observe_is_described_with_its_one_parameter(monkeypatch):
    monkeypatch.setattr("verl_clipx.cli.console.width", 200)
    shown = CliRunner().invoke(app, ["methods", "observe"])
    assert shown.exit_code == 0, shown.output
    for words in ("observe: verl's own loss, our metrics", "+clipx=observe", "compile", "auto, true or false"):
        assert words in shown.output
    refused = CliRunner().invoke(app, ["methods", "observed"])
    assert refused.exit_code == 1 and "Did you mean observe?" in refused.output.replace("\n", " ")
