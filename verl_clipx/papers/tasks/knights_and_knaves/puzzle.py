"""What people say, the puzzle that it makes, its solutions, and what makes two puzzles the same.

A statement about people, who are numbered from 0, is one of

- `("knight", i)`, `("knave", i)`: person i is a knight, or a knave;
- `("not", s)`, `("and", s, t)`, `("or", s, t)`, `("if", s, t)`, `("iff", s, t)`, where s and t are statements.

With n people there are 2**n ways to assign kinds. In way number w, person i is a knight if bit i of w is set. A truth
table is an integer whose bit number w says whether the statement holds in way w.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_clipx.papers.tasks.splits import Split, split_of_key

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


def solve(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Return every assignment, true for a knight, in which exactly the knights' statements are true."""
    people = len(statements)
    knights = knight_tables(people)
    consistent = (1 << 2**people) - 1
    for person, statement in enumerate(statements):
        consistent &= ~(knights[person] ^ truth_table(statement, knights))
    return [
        tuple(bool(way >> person & 1) for person in range(people)) for way in range(2**people) if consistent >> way & 1
    ]


@dataclass(frozen=True)
class Puzzle:
    """A puzzle with exactly one solution: what each person says, and whether each is a knight."""

    statements: tuple[Statement, ...]
    solution: tuple[bool, ...]

    @functools.cached_property
    def key(self) -> tuple[int, ...]:
        """A key that is equal for puzzles that differ only in the order of the people or in wording.

        Wording means everything that does not change the statements' truth tables.
        """
        return min(
            tuple(truth_table(self.statements[person], _renamed(order)) for person in order)
            for order in _candidate_orders(self.statements)
        )


def whole_key(puzzle: Puzzle) -> tuple[int, tuple[int, ...]]:
    """Return a key that identifies a puzzle among puzzles of all sizes."""
    return len(puzzle.statements), puzzle.key


def split_of(puzzle: Puzzle) -> Split:
    """Return a puzzle's split, which depends only on its logic and not on seed or wording."""
    return split_of_key(whole_key(puzzle))


def _renamed(order: Sequence[int]) -> list[int]:
    """Return the knights' tables after person `order[k]` has become number k."""
    tables = knight_tables(len(order))
    renamed = [0] * len(order)
    for number, person in enumerate(order):
        renamed[person] = tables[number]
    return renamed


def _candidate_orders(statements: Sequence[Statement]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the people among which the key is chosen.

    Trying all 5,040 orders of seven people would take most of the generator's time. How many ways a statement's table
    shares with each person's depends on neither wording nor order, so people who differ in that have a fixed place.
    """
    people = range(len(statements))
    knights = knight_tables(len(statements))
    tables = [truth_table(statement, knights) for statement in statements]
    shared = [[(table & knight).bit_count() for knight in knights] for table in tables]
    colours = _ranks([(tables[i].bit_count(), shared[i][i]) for i in people])
    for _ in people:
        colours = _ranks(
            [(colours[i], sorted((colours[j], shared[i][j], shared[j][i]) for j in people if j != i)) for i in people]
        )
    groups = [[i for i in people if colours[i] == colour] for colour in sorted(set(colours))]
    for parts in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield tuple(itertools.chain.from_iterable(parts))


def _ranks(values: Sequence) -> list[int]:
    position = {repr(value): rank for rank, value in enumerate(sorted(values))}
    return [position[repr(value)] for value in values]
