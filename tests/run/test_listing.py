"""What follows from the classes: the list of methods, and `clipx methods observe`.

Not covered: what the rows say, and the pages (tests/methods/test_what_a_method_needs.py).
"""

import pytest
from typer.testing import CliRunner

from verl_clipx.base.refusal import Refusal
from verl_clipx.cli import app
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.run.groups import group_settings
from verl_clipx.run.listing import describe_methods, markdown_table


def test_every_group_with_a_method_has_its_place():
    names = [path.stem for path in (configs_folder() / "clipx").glob("*.yaml")]
    chosen = [name for name in names if group_settings(name).get("method")]
    table = markdown_table()
    assert len(chosen) > 15 and [name for name in chosen if f"`{name}`" not in table] == []


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dapo", "grpo"),
        ("acpo_reference", "acpo"),
        ("clipx_acpo", "acpo"),
        ("base", None),
        ("custom", None),
        ("", None),
    ],
)
def test_a_group_is_described_by_its_method_and_what_is_none_of_a_method_is_unknown(name, method):
    if method:
        assert [result["name"] for result in describe_methods(name)] == [method]
    else:
        with pytest.raises(Refusal) as raised:
            describe_methods(name)
        assert raised.value.value == name


def test_observe_is_described_with_its_one_parameter(monkeypatch):
    monkeypatch.setattr("verl_clipx.cli.console.width", 200)
    shown = CliRunner().invoke(app, ["methods", "observe"])
    assert shown.exit_code == 0, shown.output
    for words in ("observe: verl's own loss, our metrics", "+clipx=observe", "compile", "auto, true or false"):
        assert words in shown.output
