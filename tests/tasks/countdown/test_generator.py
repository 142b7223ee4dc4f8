"""The problem generator: solvable by construction, distinct, seeded, split without overlap.

Solutions are checked by an evaluator written here, not by the reward. Not covered: the distribution of difficulty.
"""

import ast
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.generator import _combine, _Term, draw_unfinished_attempt, generate_problems, split_of


def evaluate(text: str) -> Fraction:
    wrapped = re.sub(r"\d+", lambda match: f"Fraction({match.group()})", text)
    return eval(wrapped, {"Fraction": Fraction})  # the text is the generator's own


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(),
    numbers=st.tuples(st.integers(3, 6), st.integers(3, 6)).map(sorted),
    max_value=st.integers(15, 60),
    max_target=st.integers(60, 500),
    operators=st.sampled_from(["+", "+-", "+*", "+-*", "+-*/", "-+/"]),
    split=st.sampled_from(["train", "test"]),
)
def test_solution_reaches_target_with_each_number_once(seed, numbers, max_value, max_target, operators, split):
    config = CountdownConfig(*numbers, 1, max_value, 1, max_target, operators)
    problems = generate_problems(config, 10, seed, split)
    assert len({problem.key for problem in problems}) == 10
    for problem in problems:
        assert evaluate(problem.solution) == problem.target
        assert sorted(map(int, re.findall(r"\d+", problem.solution))) == sorted(problem.numbers)
        assert set(re.findall(r"[^\d()]", problem.solution)) <= set(operators)
        assert numbers[0] <= len(problem.numbers) <= numbers[1]
        assert all(1 <= number <= max_value for number in problem.numbers)
        assert 1 <= problem.target <= max_target
        assert split_of(problem) == split


@pytest.mark.parametrize(
    ("left", "operator", "right", "expected"),
    [
        (_Term(3, "1+2", "+"), "*", _Term(4, "4", ""), "(1+2)*4"),
        (_Term(9, "9", ""), "-", _Term(3, "5-2", "-"), "9-(5-2)"),
        (_Term(9, "9", ""), "-", _Term(6, "2*3", "*"), "9-2*3"),
        (_Term(9, "9", ""), "+", _Term(3, "5-2", "-"), "9+5-2"),
        (_Term(8, "8", ""), "/", _Term(4, "2*2", "*"), "8/(2*2)"),
        (_Term(8, "8", ""), "*", _Term(2, "6/3", "/"), "8*6/3"),
    ],
)
def test_parentheses_only_where_needed(left, operator, right, expected):
    term = _combine(left, operator, right)
    assert term.text == expected
    assert evaluate(term.text) == term.value


@pytest.mark.parametrize(("left", "operator", "right"), [(2, "-", 3), (3, "/", 2), (3, "/", 0)])
def test_negative_and_broken_intermediate_results_are_refused(left, operator, right):
    assert _combine(_Term(left, str(left), ""), operator, _Term(right, str(right), "")) is None


def test_no_parentheses_are_redundant():
    for problem in generate_problems(CountdownConfig(2, 5), 300, 0, "train"):
        assert ast.unparse(ast.parse(problem.solution)).count("(") == problem.solution.count("(")


def test_same_seed_same_problems_and_longer_lists_extend_shorter_ones():
    config = CountdownConfig()
    longer = generate_problems(config, 200, 7, "train")
    assert generate_problems(config, 50, 7, "train") == longer[:50]
    assert generate_problems(config, 50, 8, "train") != longer[:50]


def test_splits_are_disjoint_across_seeds():
    config = CountdownConfig(min_numbers=2, max_numbers=2, max_value=15)
    train = {p.key for seed in range(3) for p in generate_problems(config, 200, seed, "train")}
    test = {p.key for seed in range(3) for p in generate_problems(config, 25, seed, "test")}
    assert not train & test


def test_split_ignores_the_order_of_the_numbers():
    for problem in generate_problems(CountdownConfig(), 100, 0, "test"):
        swapped = type(problem)(problem.numbers[::-1], problem.target, "anything")
        assert split_of(swapped) == "test"


def test_unfinished_attempt_leaves_out_one_number():
    problems = generate_problems(CountdownConfig(2, 5), 200, 0, "train")
    for problem in problems:
        used = Counter(map(int, re.findall(r"\d+", draw_unfinished_attempt(problem, "+-", random.Random(0)))))
        missing = Counter(problem.numbers) - used
        assert missing.total() == 1 and not used - Counter(problem.numbers)


def test_exhausted_space_says_how_many_there_are():
    config = CountdownConfig(min_numbers=2, max_numbers=2, max_value=3, operators="+")
    # 1+1, 1+2, 1+3, 2+2, 2+3, 3+3 are all there is, over both splits.
    with pytest.raises(ValueError, match=r"^count=7 train problems cannot be had .* found [1-6]; ask for fewer"):
        generate_problems(config, 7, 0, "train")


def test_unknown_split_and_negative_count_are_refused():
    with pytest.raises(ValueError, match=r"^split='dev' is unknown"):
        generate_problems(CountdownConfig(), 1, 0, "dev")
    with pytest.raises(ValueError, match=r"^count=-1 is negative"):
        generate_problems(CountdownConfig(), -1, 0, "train")
