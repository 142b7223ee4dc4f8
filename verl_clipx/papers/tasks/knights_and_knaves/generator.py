"""Generates distinct puzzles with exactly one solution, from a seed and without overlap of the splits."""

import random
from collections.abc import Iterator

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import LEAVES, Puzzle, Statement, solve, split_of, whole_key
from verl_clipx.papers.tasks.splits import MAX_FRUITLESS_DRAWS, Split, draw_distinct

MIN_PEOPLE = 2
MAX_PEOPLE = 8


def generate_puzzles(people: int, count: int, seed: int, split: Split, operators: tuple[str, ...]) -> list[Puzzle]:
    """Draw puzzles of one size and split, no two with the same key.

    Args:
        people: the number of people, MIN_PEOPLE to MAX_PEOPLE.
        count: the number of puzzles.
        seed: determines the puzzles. A shorter list is the beginning of a longer one.
        operators: those of `OPERATORS` that people use.

    Raises:
        ValueError: `people` is out of range, or there are too few such puzzles.
    """
    puzzles = draw_distinct(draw_puzzles(people, seed, split, operators), whole_key, count, split)
    if len(puzzles) < count:
        raise ValueError(
            f"count={count} {split} puzzles of {people} people do not exist with {operators}: only {len(puzzles)} "
            "were found. Ask for fewer, or for more people or operators"
        )
    return puzzles


def draw_puzzles(people: int, seed: int, split: Split, operators: tuple[str, ...]) -> Iterator[Puzzle]:
    """Yield puzzles of one size and split, endlessly. The same puzzle may appear again, also in another wording.

    Args:
        people, seed, split, operators: as for `generate_puzzles`.

    Raises:
        ValueError: at the first draw, if `people` is out of range; later, if no puzzle can be found.
    """
    if type(people) is not int or not MIN_PEOPLE <= people <= MAX_PEOPLE:
        raise ValueError(f"people={people!r} is not an integer from {MIN_PEOPLE} to {MAX_PEOPLE}; give one of those")
    rng = random.Random(f"knights-and-knaves-{people}-{split}-{seed}")
    # The number of draws since the last puzzle.
    fruitless_draws = 0
    while fruitless_draws < MAX_FRUITLESS_DRAWS:
        statements = tuple(_draw_statement(rng, person, people, operators) for person in range(people))
        solutions = solve(statements)
        if len(solutions) == 1:
            puzzle = Puzzle(statements, solutions[0])
            if split_of(puzzle) == split:
                fruitless_draws = 0
                yield puzzle
                continue
        fruitless_draws += 1
    raise ValueError(
        f"no {split} puzzle of {people} people came up in {MAX_FRUITLESS_DRAWS} draws with {operators}; "
        "ask for more people or more operators"
    )


def _draw_statement(rng: random.Random, speaker: int, people: int, operators: tuple[str, ...]) -> Statement:
    """Draw a plain statement, or an operator on plain statements. Each operator is as likely as no operator.

    Args:
        speaker: the number of the person who says it.
        people: the number of people.
        operators: the operators to choose from; empty for a plain statement.
    """
    operator = rng.choice(("plain", *operators)) if operators else "plain"
    if operator == "plain":
        leaves = [(kind, person) for person in range(people) for kind in LEAVES]
        # Nobody can say "I am a knave".
        leaves.remove(("knave", speaker))
        return rng.choice(leaves)
    left = _draw_statement(rng, speaker, people, ())
    if operator == "not":
        return ("not", left)
    right = _draw_statement(rng, speaker, people, ())
    while right == left:
        right = _draw_statement(rng, speaker, people, ())
    return (operator, left, right)
