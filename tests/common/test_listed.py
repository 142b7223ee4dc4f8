"""Lists on a console of 80 columns: names of every list of the command line stay in one piece; what fits is a table.

Not covered: colours.
"""

import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.common.listed import print_list
from verl_clipx.common.terminal import TerminalConsole


def shown(width, rows):
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        print_list(console, "things", ("name", "what"), rows, "the end")
    return captured.get()


def test_a_table_where_every_word_fits_and_lines_where_one_does_not():
    rows = [("a" * 20, "short words only"), ("b", "")]
    # 20 and 5 characters, two borders of 3 and the last line.
    assert "┃" in shown(32, rows) and "│ " + "a" * 20 + " │" in shown(32, rows)
    narrow = shown(31, rows)
    assert "┃" not in narrow
    assert narrow.splitlines() == ["things", "a" * 20, "    what: short words only", "b", "the end"]
    # No line of a table is longer than the console.
    long = shown(40, [("name_of_a_thing", "some words " * 20), ("b", "x")])
    assert max(map(len, long.splitlines())) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("methods", "grpo_clip_acpo_average clipx_ce_gppo"),
        ("methods acpo", "log_ratio_clamp acpo_reference"),
        ("recipe list bapo", "bapo/skywork_7b_bapo_partial_rollout OctoThinker-3B-Long-Zero"),
        ("recipe show acpo/orz_7b_acpo_near", "actor_rollout_ref.actor.data_loader_seed"),
        ("table list", "ar_lopti_figure4"),
        ("data list", "knights_and_knaves_tiny hitab_test_checked"),
    ],
)
def test_names_are_in_one_piece(arguments, names, monkeypatch):
    for module in ("cli", "papers.tables.recipe_commands", "papers.tables.table_commands", "papers.tasks.commands"):
        monkeypatch.setattr(f"verl_clipx.{module}.console", TerminalConsole(width=80))
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    for name in names.split():
        assert re.search(rf"(?<!\S){re.escape(name)}(?![\w/.-])", result.output), (name, result.output)
