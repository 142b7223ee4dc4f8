"""Calls of `clipx replay` as a user makes them."""

import json

from typer.testing import CliRunner

from verl_clipx.cli import app


def printed(*words) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["replay", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def numbers(run, *words) -> dict:
    """What the command prints for programs."""
    return json.loads(printed(run, *words, "--json"))


def value(found: dict, name: str, setting: int = 0) -> float:
    return found["settings"][setting]["numbers"][name]["value"]


def refusal(*words) -> str:
    done = CliRunner().invoke(app, ["replay", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())
