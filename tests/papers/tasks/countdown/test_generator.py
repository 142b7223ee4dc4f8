"""The problem generator: solvable by construction, distinct, seeded, split without overlap; what it refuses.

Solutions are checked by an evaluator written here, not by the reward. What holds of every problem is tested on
configurations that have many. Not covered: the distribution of difficulty, and from which rarity of problems on a
configuration is refused.
"""

import ast
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_clipx.papers.tasks.countdown.generator import CountdownConfig, draw_unfinished_attempt, generate_problems
from verl_clipx.papers.tasks.splits import split_of_key


def evaluate(text: str) -> Fraction:
    wrapped = re.sub(r"\d+", lambda match: f"Fraction({match.group()})", text)
    return eval(wrapped, {"Fraction": Fraction})  # the text is the generator's own


@st.composite
def configs_with_many_problems(draw) -> CountdownConfig:
    """Draw a configuration whose targets include every sum of its numbers, so that all operators find problems.

    Draws by + and - are within the targets in a quarter of cases, by all four operators in 1 of 60.
    """
    fewest, most = sorted(draw(st.tuples(st.integers(3, 6), st.integers(3, 6))))
    max_value = draw(st.integers(15, 60))
    max_target = draw(st.integers(most * max_value, 500))
    operators = draw(st.sampled_from(["+", "+-", "+*", "+-*", "+-*/", "-+/"]))
    return CountdownConfig(fewest, most, 1, max_value, 1, max_target, operators)


@settings(max_examples=30)
@given(config=configs_with_many_problems(), seed=st.integers(), split=st.sampled_from(["train", "test"]))
def test_solution_reaches_target_with_each_number_once(config, seed, split):
    problems = generate_problems(config, 10, seed, split)
    assert len({problem.key for problem in problems}) == 10
    for problem in problems:
        assert evaluate(problem.solution) == problem.target
        assert sorted(map(int, re.findall(r"\d+", problem.solution))) == sorted(problem.numbers)
        assert set(re.findall(r"[^\d()]", problem.solution)) <= set(config.operators)
        assert config.min_numbers <= len(problem.numbers) <= config.max_numbers
        assert all(1 <= number <= config.max_value for number in problem.numbers)
        assert 1 <= problem.target <= config.max_target
        assert split_of_key(problem.key) == split


def list_values(node) -> list[Fraction]:
    """Return the values of an expression and of all its parts."""
    values = [evaluate(ast.unparse(node))]
    if isinstance(node, ast.BinOp):
        values += list_values(node.left)
        values += list_values(node.right)
    return values


def generate_300_problems():
    config = CountdownConfig(
        min_numbers=2, max_numbers=5, min_value=1, max_value=20, min_target=1, max_target=99, operators="+-*/"
    )
    return generate_problems(config, 300, 0, "train")


def test_intermediate_results_are_whole_and_not_negative_and_no_parentheses_are_redundant():
    for problem in generate_300_problems():
        tree = ast.parse(problem.solution, mode="eval").body
        assert all(value >= 0 and value.denominator == 1 for value in list_values(tree)), problem.solution
        assert ast.unparse(tree).count("(") == problem.solution.count("(")


def test_numbers_are_not_in_the_order_of_the_solution():
    problems = generate_300_problems()
    in_order = [re.findall(r"\d+", problem.solution) == list(map(str, problem.numbers)) for problem in problems]
    assert sum(in_order) < 150


FEW_PROBLEMS = CountdownConfig(min_numbers=2, max_numbers=2, max_value=15)


def test_a_seed_decides_the_problems_and_their_order():
    problems = generate_problems(FEW_PROBLEMS, 200, 7, "train")
    assert generate_problems(FEW_PROBLEMS, 50, 7, "train") == problems[:50]
    assert generate_problems(FEW_PROBLEMS, 50, 8, "train") != problems[:50]


def test_splits_share_no_problem_whatever_the_seed():
    train = {problem.key for seed in range(3) for problem in generate_problems(FEW_PROBLEMS, 200, seed, "train")}
    test = {problem.key for seed in range(3) for problem in generate_problems(FEW_PROBLEMS, 25, seed, "test")}
    assert not train & test


def test_the_same_numbers_in_another_order_are_in_the_same_split():
    for problem in generate_problems(FEW_PROBLEMS, 200, 7, "train"):
        swapped = type(problem)(problem.numbers[::-1], problem.target, "anything")
        assert split_of_key(swapped.key) == "train"


def test_unfinished_attempt_leaves_out_one_number():
    for problem in generate_problems(CountdownConfig(min_numbers=2, max_numbers=5), 200, 0, "train"):
        attempt = draw_unfinished_attempt(problem, "+-", random.Random(0))
        used = Counter(map(int, re.findall(r"\d+", attempt)))
        available = Counter(problem.numbers)
        assert (available - used).total() == 1
        assert not used - available


TOO_FEW = yaml.safe_load(Path(__file__).with_name("too_few.yaml").read_text())


@pytest.mark.parametrize(("changes", "split", "count"), TOO_FEW)
def test_too_few_problems_are_counted_and_every_key_is_named(changes, split, count):
    config = CountdownConfig(**changes)
    with pytest.raises(ValueError, match=rf"^count=10: only {count} {split} problems came up with ") as raised:
        generate_problems(config, 10, 0, split)
    message = str(raised.value)
    assert repr(config) in message
    _, _, remedy = message.rpartition(";")
    assert [key for key in vars(config) if key not in remedy] == []
