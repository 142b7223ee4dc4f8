"""The solver by hand, the key of a puzzle against direct evaluation, and drawn puzzles.

Statements are evaluated here by a function of its own, one assignment at a time. Not covered: how hard puzzles are.
"""

import itertools
import random

import pytest

from verl_clipx.papers.tasks.knights_and_knaves.generator import generate_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import (
    OPERATORS,
    Puzzle,
    knight_tables,
    solve,
    split_of,
    truth_table,
)


def holds(statement, kinds) -> bool:
    kind, *parts = statement
    if kind in ("knight", "knave"):
        return kinds[parts[0]] == (kind == "knight")
    values = [holds(part, kinds) for part in parts]
    return {
        "not": lambda: not values[0],
        "and": lambda: all(values),
        "or": lambda: any(values),
        "if": lambda: values[1] if values[0] else True,
        "iff": lambda: values[0] == values[1],
    }[kind]()


@pytest.mark.parametrize("statement", [("xor", ("knight", 0), ("knight", 1)), ("knight",), ("and", ("knight", 0)), ()])
def test_statements_of_another_form_are_refused(statement):
    with pytest.raises(ValueError, match="has an unknown form"):
        truth_table(statement, knight_tables(2))


HARPER, EMMA, MIA, LUKE, ALEXANDER, DAVID, ETHAN = range(7)
PRINTED = [
    # Appendix C.1.1 of arXiv 2505.12929: three (Alexander, Lily, Samuel) and seven people, with the solutions there.
    ((("or", ("knave", 1), ("knight", 1)), ("iff", ("knight", 2), ("knight", 1)), ("knight", 1)), [(True,) * 3]),
    (
        (
            ("not", ("knight", DAVID)),
            ("knight", DAVID),
            ("if", ("knight", EMMA), ("knave", EMMA)),
            ("if", ("knave", ALEXANDER), ("knight", EMMA)),
            ("if", ("knight", DAVID), ("knave", HARPER)),
            ("not", ("knight", ALEXANDER)),
            ("knight", HARPER),
        ),
        [(True, False, True, True, True, False, True)],
    ),
    ((("knave", 0), ("knight", 0)), []),  # the liar
    ((("knight", 1), ("knight", 0)), [(False, False), (True, True)]),
]


@pytest.mark.parametrize(("statements", "solutions"), PRINTED)
def test_solutions_by_hand(statements, solutions):
    assert solve(statements) == solutions


def same_by_search(first, second) -> bool:
    """Whether some order of the people turns one puzzle's meaning into the other's."""
    people = range(len(first))
    ways = list(itertools.product([False, True], repeat=len(first)))
    return any(
        all(
            holds(first[order[i]], [kinds[order.index(p)] for p in people]) == holds(second[i], kinds)
            for i in people
            for kinds in ways
        )
        for order in map(list, itertools.permutations(people))
    )


def test_keys_are_equal_only_for_equal_puzzles():
    # Puzzles so small that chance makes some of them equal.
    rng = random.Random(0)
    leaves = [("knight", 0), ("knave", 1), ("knight", 1), ("knight", 2), ("knave", 2), ("not", ("knight", 2))]
    puzzles = [
        tuple((rng.choice(["and", "or", "if", "iff"]), *rng.choices(leaves, k=2)) for _ in range(3)) for _ in range(80)
    ]
    pairs = list(itertools.combinations(puzzles, 2))
    equal = [Puzzle(first, ()).key == Puzzle(second, ()).key for first, second in pairs]
    assert equal == [same_by_search(first, second) for first, second in pairs]
    assert 0 < sum(equal) < len(equal)
    # A ring of seven is keyed though everyone looks alike.
    ring, turned = (tuple(("knave", (person + step) % 7) for person in range(7)) for step in (1, 3))
    assert Puzzle(ring, ()).key == Puzzle(turned, ()).key


def depth(statement) -> int:
    return 1 + max((depth(part) for part in statement[1:] if isinstance(part, tuple)), default=0)


def kinds_in(statement) -> set:
    return {statement[0]}.union(*(kinds_in(part) for part in statement[1:] if isinstance(part, tuple)))


@pytest.mark.parametrize("people", [3, 5, 7])
def test_drawn_puzzles_have_one_solution_and_are_those_of_the_published_set(people):
    drawn = {split: generate_puzzles(people, 60, 0, split, OPERATORS) for split in ("train", "test")}
    for split, puzzles in drawn.items():
        assert len(puzzles) == len({puzzle.key for puzzle in puzzles}) == 60
        for puzzle in puzzles:
            assert len(puzzle.statements) == people and solve(puzzle.statements) == [puzzle.solution]
            assert split_of(puzzle) == split
            # Nobody says "I am a knave", and nobody joins a statement with itself.
            assert all(puzzle.statements[person] != ("knave", person) for person in range(people))
            assert all(said[1] != said[2] for said in puzzle.statements if len(said) == 3)
        said = [statement for puzzle in puzzles for statement in puzzle.statements]
        assert set().union(*map(kinds_in, said)) == {"knight", "knave", *OPERATORS}
        assert {depth(statement) for statement in said} == {1, 2}
    others = {puzzle.key for seed in (1, 2) for puzzle in generate_puzzles(people, 50, seed, "test", OPERATORS)}
    assert not others & {puzzle.key for puzzle in drawn["train"]}
    assert generate_puzzles(people, 20, 0, "train", OPERATORS) == drawn["train"][:20]
    assert generate_puzzles(people, 20, 1, "train", OPERATORS) != drawn["train"][:20]


@pytest.mark.parametrize(
    ("count", "operators", "message"),
    [
        pytest.param(1000, OPERATORS, "count=1000 train puzzles of 2 people .* 35 were found", marks=pytest.mark.slow),
        # Exchange knights and knaves: what plain statements and "not" say about each other still holds.
        (1, ("not",), "no train puzzle of 2 people came up in 20000 draws"),
    ],
)
def test_too_few_puzzles_are_counted(count, operators, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate_puzzles(2, count, 0, "train", operators)
