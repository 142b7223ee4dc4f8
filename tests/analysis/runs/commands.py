"""Commands of the plugin as a user calls them."""

import json

from typer.testing import CliRunner

from verl_clipx.cli import app


def clipx(*words, code: int | None = 0) -> str:
    """What a command prints, with one blank for each white space. It must end with the exit code; None: with any."""
    # Wide enough that no table breaks a word.
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*map(str, words)], catch_exceptions=False)
    assert code in (None, done.exit_code), done.output
    return " ".join(done.output.split())


def answer(*words, code: int | None = 0) -> dict:
    """What a command prints for programs; the exit code as for `clipx`."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert code in (None, done.exit_code), done.output
    return json.loads(done.stdout)


def page_of(out) -> str:
    """The page of `clipx report`, without the places where it may break within a key."""
    return (out / "report.html").read_text().replace("<wbr>", "")
