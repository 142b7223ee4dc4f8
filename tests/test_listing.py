"""What follows from the classes: README's table of methods, and `clipx methods observe`.

Covers: README has the table that `clipx methods --markdown` prints, and every group that chooses a method is in it;
what `clipx methods observe` shows. Not covered: what the rows say, the other columns of `clipx methods`
(tests/training/test_groups.py).
"""

from pathlib import Path

from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.configs_folder import configs_folder
from verl_clipx.listing import group_settings, markdown_table

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- clipx methods --markdown -->\n", "\n<!-- end -->"


def test_readme_has_the_table_that_the_command_prints():
    table = README.read_text().split(START)[1].split(END)[0]
    assert table == markdown_table(), "clipx methods --markdown prints the table that README should have"


def test_every_group_with_a_method_has_its_place():
    names = [path.stem for path in (configs_folder() / "clipx").glob("*.yaml")]
    chosen = [name for name in names if group_settings(name).get("method")]
    assert len(chosen) > 15
    table = markdown_table()
    assert not [name for name in chosen if f"`{name}`" not in table]


def test_observe_is_described_with_its_one_parameter(monkeypatch):
    monkeypatch.setattr("verl_clipx.cli.console.width", 200)
    shown = CliRunner().invoke(app, ["methods", "observe"])
    assert shown.exit_code == 0, shown.output
    for words in ("observe: verl's own loss, our metrics", "+clipx=observe", "compile", "auto, true or false"):
        assert words in shown.output
    refused = CliRunner().invoke(app, ["methods", "observed"])
    assert refused.exit_code == 1 and "must be one of grpo" in refused.output.replace("\n", " ")
