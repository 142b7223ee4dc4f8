"""Calls of `clipx replay` as a user makes them."""

import json

from typer.testing import CliRunner

from verl_clipx.cli import app


def printed(*words) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["replay", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def numbers(tmp_path, run, *words) -> dict:
    """What the command writes."""
    printed(run, *words, "--json", tmp_path / "replay.json")
    return json.loads((tmp_path / "replay.json").read_text())


def value(found: dict, name: str, setting: int = 0) -> float:
    return found["settings"][setting]["numbers"][name]["value"]


def refusal(*words) -> str:
    done = CliRunner().invoke(app, ["replay", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())
