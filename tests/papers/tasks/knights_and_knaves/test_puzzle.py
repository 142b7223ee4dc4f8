"""Truth tables, the solver and the key of a puzzle, against direct evaluation and by hand.

Statements are evaluated here by a function of its own, one assignment at a time. Not covered: how puzzles are drawn.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle, solve, split_of
from verl_clipx.papers.tasks.knights_and_knaves.statement import knight_tables, truth_table


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


def statements_about(people: int):
    person = st.integers(0, people - 1)
    leaf = st.tuples(st.sampled_from(["knight", "knave"]), person)
    return st.recursive(
        leaf,
        lambda inner: (
            st.tuples(st.just("not"), inner) | st.tuples(st.sampled_from(["and", "or", "if", "iff"]), inner, inner)
        ),
        max_leaves=4,
    )


def puzzles_of(smallest: int, largest: int):
    return st.integers(smallest, largest).flatmap(
        lambda people: st.tuples(*[statements_about(people) for _ in range(people)])
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(puzzles_of(2, 4))
def test_solutions_are_those_of_a_search_by_hand(statements):
    expected = [
        kinds
        for kinds in itertools.product([False, True], repeat=len(statements))
        if all(holds(statement, kinds) == kind for statement, kind in zip(statements, kinds, strict=True))
    ]
    assert sorted(solve(statements)) == expected


def test_truth_tables_by_hand():
    knights = knight_tables(2)  # ways: nobody, person 0, person 1, both are knights
    assert knights == (0b1010, 0b1100)
    a, b = ("knight", 0), ("knight", 1)
    for statement, table in {
        ("knave", 0): 0b0101,
        ("not", a): 0b0101,
        ("and", a, b): 0b1000,
        ("or", a, b): 0b1110,
        ("if", a, b): 0b1101,
        ("iff", a, b): 0b1001,
    }.items():
        assert truth_table(statement, knights) == table


@pytest.mark.parametrize("statement", [("xor", ("knight", 0), ("knight", 1)), ("knight",), ("and", ("knight", 0)), ()])
def test_unknown_form_is_refused(statement):
    with pytest.raises(ValueError, match="has an unknown form"):
        truth_table(statement, knight_tables(2))


def test_the_papers_examples():
    # Appendix C.1.1 of arXiv 2505.12929: three and seven people, with the solutions printed there.
    alexander, lily, samuel = range(3)
    three = (
        ("or", ("knave", lily), ("knight", lily)),
        ("iff", ("knight", samuel), ("knight", lily)),
        ("knight", lily),
    )
    assert solve(three) == [(True, True, True)]
    harper, emma, _, _, alexander, david, _ = range(7)  # the others are mia, luke and ethan
    seven = (
        ("not", ("knight", david)),
        ("knight", david),
        ("if", ("knight", emma), ("knave", emma)),
        ("if", ("knave", alexander), ("knight", emma)),
        ("if", ("knight", david), ("knave", harper)),
        ("not", ("knight", alexander)),
        ("knight", harper),
    )
    assert solve(seven) == [(True, False, True, True, True, False, True)]


def test_none_and_several_solutions():
    assert solve((("knave", 0), ("knight", 0))) == []  # the liar
    assert solve((("knight", 1), ("knight", 0))) == [(False, False), (True, True)]


def rename(statement, number):
    kind, *parts = statement
    return (kind, *(number[part] if isinstance(part, int) else rename(part, number) for part in parts))


def reword(statement, rng):
    """Another statement with the same truth table."""
    kind, *parts = statement
    if kind in ("knight", "knave"):
        other = "knave" if kind == "knight" else "knight"
        return rng.choice([statement, ("not", (other, *parts))])
    parts = [reword(part, rng) for part in parts]
    if kind == "if":
        left, right = parts
        return rng.choice([("if", left, right), ("or", ("not", left), right), ("if", ("not", right), ("not", left))])
    return (kind, *reversed(parts))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(puzzles_of(2, 5), st.randoms(use_true_random=False))
def test_key_ignores_order_of_people_and_wording(statements, rng):
    order = list(range(len(statements)))
    rng.shuffle(order)
    number = {person: place for place, person in enumerate(order)}
    other = tuple(reword(rename(statements[person], number), rng) for person in order)
    first, second = Puzzle(statements, ()), Puzzle(other, ())
    assert first.key == second.key
    assert split_of(first) == split_of(second)


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
    leaves = [("knight", 0), ("knave", 1), ("knight", 1), ("knight", 2), ("knave", 2)]
    puzzles = [
        tuple((rng.choice(["and", "or"]), rng.choice(leaves), rng.choice(leaves)) for _ in range(3)) for _ in range(60)
    ]
    pairs = list(itertools.combinations(puzzles, 2))
    equal = [Puzzle(first, ()).key == Puzzle(second, ()).key for first, second in pairs]
    assert equal == [same_by_search(first, second) for first, second in pairs]
    assert 0 < sum(equal) < len(equal)


def test_a_ring_of_seven_is_keyed_though_everyone_looks_alike():
    ring = tuple(("knave", (person + 1) % 7) for person in range(7))
    turned = tuple(("knave", (person + 3) % 7) for person in range(7))
    assert Puzzle(ring, ()).key == Puzzle(turned, ()).key
