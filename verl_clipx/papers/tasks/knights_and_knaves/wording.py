"""Writes puzzles in English, by the words in wording.yaml."""

import random
from collections.abc import Sequence
from importlib.resources import files

import yaml

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle, Statement
from verl_clipx.papers.tasks.templates import template_named

_WORDS = yaml.safe_load(
    files("verl_clipx.papers.tasks.knights_and_knaves").joinpath("wording.yaml").read_text(encoding="utf-8")
)
NAMES = _WORDS["names"]
SAYINGS = _WORDS["sayings"]


def word_puzzle(puzzle: Puzzle, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Name the people, and write what they say.

    Args:
        puzzle: a puzzle with at most as many people as there are `NAMES`.

    Returns:
        The question in English, and the name of each person.
    """
    names = tuple(rng.sample(NAMES, len(puzzle.statements)))
    statements = " ".join(
        rng.choice(SAYINGS).format(name=name, statement=word_statement(statement, names))
        for name, statement in zip(names, puzzle.statements, strict=True)
    )
    inhabitants = f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}."
    (message,) = template_named("kk_puzzle").render(puzzle=f"{inhabitants} {statements}")
    return message["content"], names


def word_statement(statement: Statement, names: Sequence[str]) -> str:
    """Write in English a plain statement, the negation of one, or two of them joined."""
    match statement:
        case ("knight", person):
            return f"{names[person]} is a knight"
        case ("knave", person):
            return f"{names[person]} is a knave"
        case ("not", (kind, person)):
            return f"{names[person]} is not a {kind}"
    operator, left, right = statement
    return _WORDS["joined"][operator].format(word_statement(left, names), word_statement(right, names))


def word_solution(solution: Sequence[bool], names: Sequence[str]) -> str:
    """Write a solution with a line per person, such as "(1) Zoey is a knight"."""
    return "\n".join(
        f"({number}) {name} is a {'knight' if is_knight else 'knave'}"
        for number, (name, is_knight) in enumerate(zip(names, solution, strict=True), start=1)
    )
