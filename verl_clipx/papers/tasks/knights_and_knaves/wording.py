"""Writes puzzles in English, worded like the published set (K&K, arXiv 2410.23123) that the papers train on."""

import random
from collections.abc import Sequence

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle
from verl_clipx.papers.tasks.knights_and_knaves.statement import Statement
from verl_clipx.papers.tasks.templates import template_named

_NAMES = """
Abigail Aiden Alexander Amelia Aria Aurora Ava Avery Benjamin Charlotte Chloe Daniel David Elizabeth Ella Emily
Emma Ethan Evelyn Grace Harper Henry Isabella Jack Jackson Jacob James Joseph Liam Lily Logan Lucas Luke Mason
Matthew Mia Michael Noah Oliver Olivia Owen Penelope Riley Samuel Scarlett Sebastian Sofia Sophia Victoria
William Zoey
"""
NAMES = tuple(_NAMES.split())

SAYINGS = (
    "{name} said that {statement}.",
    "{name} told you that {statement}.",
    "{name} expressed that {statement}.",
    '{name} said, "{statement}."',
    '{name} stated, "{statement}".',
    '{name} remarked, "{statement}".',
    '{name} commented, "{statement}".',
    '{name} asserted: "{statement}".',
    '{name} was heard saying, "{statement}".',
    'According to {name}, "{statement}".',
    'As {name} put it, "{statement}".',
    'In {name}\'s words: "{statement}".',
    'In a statement by {name}: "{statement}".',
    '"{statement}," {name} declared.',
    '"{statement}," {name} mentioned.',
    '"{statement}" - {name}.',
)

_JOINED = {"and": "{0} and {1}", "or": "{0} or {1}", "if": "If {0} then {1}", "iff": "{0} if and only if {1}"}


def word_puzzle(puzzle: Puzzle, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Name the people, and write what they say.

    Args:
        puzzle: a puzzle with at most as many people as there are `NAMES`.

    Returns:
        The question in English, and the name of each person.
    """
    names = tuple(rng.sample(NAMES, len(puzzle.statements)))
    said = " ".join(
        rng.choice(SAYINGS).format(name=name, statement=word_statement(statement, names))
        for name, statement in zip(names, puzzle.statements, strict=True)
    )
    inhabitants = f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}."
    (message,) = template_named("kk_puzzle").render(puzzle=f"{inhabitants} {said}")
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
    return _JOINED[operator].format(word_statement(left, names), word_statement(right, names))


def word_solution(solution: Sequence[bool], names: Sequence[str]) -> str:
    """Write a solution with a line per person, such as "(1) Zoey is a knight"."""
    return "\n".join(
        f"({number}) {name} is a {'knight' if is_knight else 'knave'}"
        for number, (name, is_knight) in enumerate(zip(names, solution, strict=True), start=1)
    )
