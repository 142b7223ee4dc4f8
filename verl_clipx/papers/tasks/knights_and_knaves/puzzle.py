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
    """Return the truth table of "person i is a knight" for each person i, over 2**people ways."""
    tables = []
    for person in range(people):
        ways_as_knight = [way for way in range(2**people) if way >> person & 1]
        tables.append(sum(1 << way for way in ways_as_knight))
    return tuple(tables)


def truth_table(statement: Statement, knights: Sequence[int]) -> int:
    """Return the truth table of a statement.

    Args:
        knights: for each person, the truth table of "this person is a knight". Tables in another order rename the
            people.
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
    """Return every assignment of kinds in which the knights' statements are true and the knaves' are false.

    Args:
        statements: what each person says.

    Returns:
        For each assignment, whether each person is a knight.
    """
    people = len(statements)
    knights = knight_tables(people)
    # A bit for each way; at first all are consistent.
    consistent = (1 << 2**people) - 1
    for person, statement in enumerate(statements):
        # In these ways, the statement is true of a knave or false of a knight.
        contradicted = knights[person] ^ truth_table(statement, knights)
        consistent &= ~contradicted
    solutions = []
    for way in range(2**people):
        if consistent >> way & 1:
            solutions.append(tuple(bool(way >> person & 1) for person in range(people)))
    return solutions


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
        keys = []
        for order in _candidate_orders(self.statements):
            knights = _renamed(order)
            keys.append(tuple(truth_table(self.statements[person], knights) for person in order))
        return min(keys)


def whole_key(puzzle: Puzzle) -> tuple[int, tuple[int, ...]]:
    """Return a key that identifies a puzzle among puzzles of all sizes."""
    return len(puzzle.statements), puzzle.key


def split_of(puzzle: Puzzle) -> Split:
    """Return a puzzle's split, which depends only on its logic and not on seed or wording."""
    return split_of_key(whole_key(puzzle))


def _renamed(order: Sequence[int]) -> list[int]:
    """Return the result of `knight_tables` after person `order[k]` has got the number k."""
    tables = knight_tables(len(order))
    renamed = [0] * len(order)
    for number, person in enumerate(order):
        renamed[person] = tables[number]
    return renamed


def _candidate_orders(statements: Sequence[Statement]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the people among which the key is chosen.

    Trying all 5,040 orders of seven people would take most of the generator's time. How many ways a statement's table
    shares with each person's depends on neither wording nor order. People who differ in that get different ranks, and
    the ranks fix their order. Only people of equal rank are tried in all orders.
    """
    people = range(len(statements))
    knights = knight_tables(len(statements))
    tables = [truth_table(statement, knights) for statement in statements]
    # In how many ways the statement of person i is true while person j is a knight.
    shared = [[(table & knight).bit_count() for knight in knights] for table in tables]
    ranks = _ranks([(tables[i].bit_count(), shared[i][i]) for i in people])
    # Each round also compares how people are related to the others, by the others' ranks. As many rounds as there are
    # people are enough.
    for _ in people:
        relations = []
        for i in people:
            to_others = sorted((ranks[j], shared[i][j], shared[j][i]) for j in people if j != i)
            relations.append((ranks[i], to_others))
        ranks = _ranks(relations)
    groups = [[i for i in people if ranks[i] == rank] for rank in sorted(set(ranks))]
    orders_of_groups = [itertools.permutations(group) for group in groups]
    for parts in itertools.product(*orders_of_groups):
        yield tuple(itertools.chain.from_iterable(parts))


def _ranks(values: Sequence[Any]) -> list[int]:
    """Return a rank for each value: equal for equal values, and in the order of the values."""
    # The values may contain lists, so they cannot be keys themselves.
    rank_by_text = {repr(value): rank for rank, value in enumerate(sorted(values))}
    return [rank_by_text[repr(value)] for value in values]
