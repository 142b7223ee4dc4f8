"""Puzzles in a notation of a few characters, made for a policy of about a million parameters."""

from collections.abc import Sequence

from verl_clipx.tasks.knights_and_knaves.statement import Statement

LETTERS = "ABCDEFGH"

_SIGNS = {"and": "&", "or": "|", "if": ">", "iff": "="}


def compact_puzzle(statements: Sequence[Statement]) -> str:
    """Write what each person says, such as "A:B&~C B:A=C C:~A".

    A letter stands for "is a knight", ~ before it for "is a knave", ! for "not", & | > = for and, or, if … then, if and
    only if.

    Args:
        statements: what person i says, for each person; at most 8 people.
    """
    return " ".join(f"{letter}:{_write(statement)}" for letter, statement in zip(LETTERS, statements, strict=False))


def _write(statement: Statement) -> str:
    match statement:
        case ("knight", person):
            return LETTERS[person]
        case ("knave", person):
            return f"~{LETTERS[person]}"
        case ("not", inner):
            return f"!{_write_part(inner)}"
    operator, left, right = statement
    return f"{_write_part(left)}{_SIGNS[operator]}{_write_part(right)}"


def _write_part(statement: Statement) -> str:
    text = _write(statement)
    return text if statement[0] in ("knight", "knave") else f"({text})"
