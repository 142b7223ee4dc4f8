"""Drawn puzzles: one solution, distinct, seeded, split without overlap, counts as the papers have them.

Not covered: how hard they are.
"""

import pytest

from verl_clipx.papers.tasks.knights_and_knaves.generator import draw_puzzles, generate_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import solve, split_of
from verl_clipx.papers.tasks.knights_and_knaves.statement import OPERATORS


def depth(statement) -> int:
    return 1 + max((depth(part) for part in statement[1:] if isinstance(part, tuple)), default=0)


def kinds_in(statement) -> set:
    return {statement[0]}.union(*(kinds_in(part) for part in statement[1:] if isinstance(part, tuple)))


@pytest.fixture(scope="module")
def paper():
    return {
        (people, split): generate_puzzles(people, count, 0, split, OPERATORS)
        for people in (3, 4, 5, 6, 7)
        for split, count in (("train", 900), ("test", 100))
    }


@pytest.mark.slow
def test_the_papers_counts_each_with_one_solution_and_no_two_alike(paper):
    for (people, split), puzzles in paper.items():
        assert len(puzzles) == len({puzzle.key for puzzle in puzzles}) == {"train": 900, "test": 100}[split]
        for puzzle in puzzles:
            assert len(puzzle.statements) == people
            assert solve(puzzle.statements) == [puzzle.solution]
            assert split_of(puzzle) == split


@pytest.mark.slow
def test_train_and_test_share_no_puzzle_across_seeds(paper):
    for people in (3, 7):
        train = {puzzle.key for puzzle in paper[people, "train"]}
        test = {puzzle.key for seed in (1, 2) for puzzle in generate_puzzles(people, 50, seed, "test", OPERATORS)}
        assert not train & test


def test_statements_are_those_of_the_published_set(paper):
    said = [statement for puzzles in paper.values() for puzzle in puzzles for statement in puzzle.statements]
    assert set().union(*map(kinds_in, said)) == {"knight", "knave", "not", "and", "or", "if", "iff"}
    assert {depth(statement) for statement in said} == {1, 2}
    # Nobody says "I am a knave", and nobody joins a statement with itself.
    assert all(
        puzzle.statements[person] != ("knave", person)
        for puzzles in paper.values()
        for puzzle in puzzles
        for person in range(len(puzzle.statements))
    )
    assert all(statement[1] != statement[2] for statement in said if len(statement) == 3)


def test_other_operators():
    said = [one for puzzle in generate_puzzles(4, 200, 0, "train", ("not", "or")) for one in puzzle.statements]
    assert set().union(*map(kinds_in, said)) == {"knight", "knave", "not", "or"}


def test_same_seed_same_puzzles_and_longer_lists_extend_shorter_ones(paper):
    longer = paper[3, "train"]
    assert generate_puzzles(3, 50, 0, "train", OPERATORS) == longer[:50]
    assert generate_puzzles(3, 50, 1, "train", OPERATORS) != longer[:50]


@pytest.mark.slow
def test_exhausted_space_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"^count=1000 train puzzles of 2 people .* 35 were found\. Ask for fewer"):
        generate_puzzles(2, 1000, 0, "train", OPERATORS)


def test_statements_that_never_settle_who_is_who_are_refused():
    # Exchange knights and knaves: what plain statements and "not" say about each other still holds.
    with pytest.raises(ValueError, match=r"^no train puzzle of 2 people came up in 20000 draws"):
        generate_puzzles(2, 1, 0, "train", ("not",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 5, 0, "train"), "people=1 is not an integer from 2 to 8"),
        ((9, 5, 0, "train"), "people=9 "),
        ((3.0, 5, 0, "train"), "people=3.0 "),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate_puzzles(*arguments, OPERATORS)


def test_draws_repeat_but_stay_in_their_split():
    draws = draw_puzzles(2, 0, "test", OPERATORS)
    puzzles = [next(draws) for _ in range(50)]
    assert {split_of(puzzle) for puzzle in puzzles} == {"test"}
    assert len({puzzle.key for puzzle in puzzles}) < len(set(puzzles)) <= 50
