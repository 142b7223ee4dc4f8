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


# Places of those among the seven people of whom somebody speaks, by the names in the paper.
HARPER, EMMA, ALEXANDER, DAVID = 0, 1, 4, 5


@pytest.mark.parametrize(
    ("statements", "solutions"),
    [
        pytest.param(
            (("or", ("knave", 1), ("knight", 1)), ("iff", ("knight", 2), ("knight", 1)), ("knight", 1)),
            [(True, True, True)],
            id="three people of arXiv 2505.12929, Appendix C.1.1",
        ),
        pytest.param(
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
            id="seven people of the same appendix",
        ),
        pytest.param((("knave", 0), ("knight", 0)), [], id="the liar"),
        pytest.param((("knight", 1), ("knight", 0)), [(False, False), (True, True)], id="two solutions"),
    ],
)
def test_solutions_by_hand(statements, solutions):
    assert solve(statements) == solutions


def are_equal_by_search(first, second) -> bool:
    """Return whether some order of the people turns one puzzle's meaning into the other's."""
    return any(is_turned_into(first, second, order) for order in itertools.permutations(range(len(first))))


def is_turned_into(first, second, order) -> bool:
    """Return whether the second puzzle's people, who are the first one's in an order, say the same."""
    people = range(len(first))
    for kinds in itertools.product([False, True], repeat=len(first)):
        kinds_of_first = [kinds[order.index(person)] for person in people]
        for person in people:
            if holds(first[order[person]], kinds_of_first) != holds(second[person], kinds):
                return False
    return True


def test_keys_are_equal_only_for_equal_puzzles():
    # Puzzles so small that chance makes some of them equal.
    rng = random.Random(0)
    leaves = [("knight", 0), ("knave", 1), ("knight", 1), ("knight", 2), ("knave", 2), ("not", ("knight", 2))]
    puzzles = [
        tuple((rng.choice(["and", "or", "if", "iff"]), *rng.choices(leaves, k=2)) for _ in range(3)) for _ in range(80)
    ]
    pairs = list(itertools.combinations(puzzles, 2))
    have_equal_keys = [Puzzle(first, ()).key == Puzzle(second, ()).key for first, second in pairs]
    assert have_equal_keys == [are_equal_by_search(first, second) for first, second in pairs]
    assert 0 < sum(have_equal_keys) < len(pairs)


def test_a_ring_of_seven_has_a_key_though_everyone_looks_alike():
    ring = tuple(("knave", (person + 1) % 7) for person in range(7))
    turned = tuple(("knave", (person + 3) % 7) for person in range(7))
    assert Puzzle(ring, ()).key == Puzzle(turned, ()).key


def measure_depth(statement) -> int:
    return 1 + max((measure_depth(part) for part in statement[1:] if isinstance(part, tuple)), default=0)


def list_kinds(statement) -> set:
    return {statement[0]}.union(*(list_kinds(part) for part in statement[1:] if isinstance(part, tuple)))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("people", [3, 5, 7])
def test_drawn_puzzles_have_one_solution_and_are_those_of_the_published_set(people, split):
    puzzles = generate_puzzles(people, 60, 0, split, OPERATORS)
    assert len(puzzles) == len({puzzle.key for puzzle in puzzles}) == 60
    for puzzle in puzzles:
        assert len(puzzle.statements) == people
        assert solve(puzzle.statements) == [puzzle.solution]
        assert split_of(puzzle) == split
        # Nobody says "I am a knave", and nobody joins a statement with itself.
        assert all(puzzle.statements[person] != ("knave", person) for person in range(people))
        assert all(statement[1] != statement[2] for statement in puzzle.statements if len(statement) == 3)
    statements = [statement for puzzle in puzzles for statement in puzzle.statements]
    assert set().union(*map(list_kinds, statements)) == {"knight", "knave", *OPERATORS}
    assert {measure_depth(statement) for statement in statements} == {1, 2}


@pytest.mark.parametrize("people", [3, 5, 7])
def test_splits_share_no_puzzle_whatever_the_seed(people):
    train = {puzzle.key for puzzle in generate_puzzles(people, 60, 0, "train", OPERATORS)}
    test = {puzzle.key for seed in (1, 2) for puzzle in generate_puzzles(people, 50, seed, "test", OPERATORS)}
    assert not test & train


@pytest.mark.parametrize("people", [3, 5, 7])
def test_a_seed_decides_the_puzzles_and_their_order(people):
    puzzles = generate_puzzles(people, 60, 0, "train", OPERATORS)
    assert generate_puzzles(people, 20, 0, "train", OPERATORS) == puzzles[:20]
    assert generate_puzzles(people, 20, 1, "train", OPERATORS) != puzzles[:20]


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
