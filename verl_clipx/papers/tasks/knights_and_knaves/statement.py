"""Represents what people say as nested tuples, and what it means as truth tables.

A statement about people, who are numbered from 0, is one of

- `("knight", i)`, `("knave", i)`: person i is a knight, or a knave;
- `("not", s)`, `("and", s, t)`, `("or", s, t)`, `("if", s, t)`, `("iff", s, t)`, where s and t are statements.

With n people there are 2**n ways to assign kinds. In way number w, person i is a knight if bit i of w is set. A truth
table is an integer whose bit number w says whether the statement holds in way w.
"""

import functools
from collections.abc import Sequence
from typing import Any

Statement = tuple[Any, ...]

LEAVES = ("knight", "knave")
OPERATORS = ("not", "and", "or", "if", "iff")


@functools.cache
def knight_tables(people: int) -> tuple[int, ...]:
    """Return the truth table of "person i is a knight" for each person, over 2**people ways."""
    return tuple(sum(1 << way for way in range(2**people) if way >> person & 1) for person in range(people))


def truth_table(statement: Statement, knights: Sequence[int]) -> int:
    """Return the truth table of a statement.

    Args:
        knights: for each person, the table of "this person is a knight". Reordering them renames the people.

    Raises:
        ValueError: the statement has an unknown form.
    """
    everything = (1 << 2 ** len(knights)) - 1
    match statement:
        case ("knight", person):
            return knights[person]
        case ("knave", person):
            return everything ^ knights[person]
        case ("not", inner):
            return everything ^ truth_table(inner, knights)
        case ("and", left, right):
            return truth_table(left, knights) & truth_table(right, knights)
        case ("or", left, right):
            return truth_table(left, knights) | truth_table(right, knights)
        case ("if", left, right):
            return (everything ^ truth_table(left, knights)) | truth_table(right, knights)
        case ("iff", left, right):
            return everything ^ truth_table(left, knights) ^ truth_table(right, knights)
    raise ValueError(f"statement={statement!r} has an unknown form; use one of {LEAVES + OPERATORS}")
