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
def generous(draw) -> CountdownConfig:
    """Configurations whose targets include every sum of their numbers, so that every set of operators finds problems.

    Draws by + and - are within the targets in a quarter of cases, by all four operators in 1 of 60.
    """
    fewest, most = sorted(draw(st.tuples(st.integers(3, 6), st.integers(3, 6))))
    max_value = draw(st.integers(15, 60))
    max_target = draw(st.integers(most * max_value, 500))
    operators = draw(st.sampled_from(["+", "+-", "+*", "+-*", "+-*/", "-+/"]))
    return CountdownConfig(fewest, most, 1, max_value, 1, max_target, operators)


@settings(max_examples=30)
@given(config=generous(), seed=st.integers(), split=st.sampled_from(["train", "test"]))
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


def test_intermediate_results_are_whole_and_not_negative_and_no_parentheses_are_redundant():
    def values(node):
        value = evaluate(ast.unparse(node))
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        return [value, *(inner for part in parts for inner in values(part))]

    problems = generate_problems(CountdownConfig(2, 5, 1, 20, 1, 99, "+-*/"), 300, 0, "train")
    for problem in problems:
        tree = ast.parse(problem.solution, mode="eval").body
        assert all(value >= 0 and value.denominator == 1 for value in values(tree)), problem.solution
        assert ast.unparse(tree).count("(") == problem.solution.count("(")
    # Numbers are not asked for in the order of the solution.
    in_order = [re.findall(r"\d+", problem.solution) == list(map(str, problem.numbers)) for problem in problems]
    assert sum(in_order) < 150


def test_seeds_and_splits():
    config = CountdownConfig(min_numbers=2, max_numbers=2, max_value=15)
    longer = generate_problems(config, 200, 7, "train")
    assert generate_problems(config, 50, 7, "train") == longer[:50] != generate_problems(config, 50, 8, "train")
    train = {p.key for seed in range(3) for p in generate_problems(config, 200, seed, "train")}
    test = {p.key for seed in range(3) for p in generate_problems(config, 25, seed, "test")}
    assert not train & test
    for problem in longer:
        swapped = type(problem)(problem.numbers[::-1], problem.target, "anything")
        assert split_of_key(swapped.key) == "train"


def test_unfinished_attempt_leaves_out_one_number():
    for problem in generate_problems(CountdownConfig(2, 5), 200, 0, "train"):
        used = Counter(map(int, re.findall(r"\d+", draw_unfinished_attempt(problem, "+-", random.Random(0)))))
        missing = Counter(problem.numbers) - used
        assert missing.total() == 1 and not used - Counter(problem.numbers)


TOO_FEW = yaml.safe_load(Path(__file__).with_name("too_few.yaml").read_text())


@pytest.mark.parametrize(("changes", "split", "found"), TOO_FEW)
def test_too_few_problems_are_counted_and_every_key_is_named(changes, split, found):
    config = CountdownConfig(**changes)
    with pytest.raises(ValueError, match=rf"^count=10: only {found} {split} problems came up with ") as refused:
        generate_problems(config, 10, 0, split)
    message = str(refused.value)
    assert repr(config) in message and all(key in message.rpartition(";")[2] for key in vars(config))
