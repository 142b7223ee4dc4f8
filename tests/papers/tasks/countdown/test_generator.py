"""The problem generator: solvable by construction, distinct, seeded, split without overlap.

Solutions are checked by an evaluator written here, not by the reward. What holds of every problem is tested on
configurations that have many; those that have none, or too few to be found, are refused. Not covered: the distribution
of difficulty, and from which rarity of problems on a configuration is refused.
"""

import ast
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.papers.tasks.countdown import generator
from verl_clipx.papers.tasks.countdown.config import CountdownConfig
from verl_clipx.papers.tasks.countdown.generator import _combine, _Term, draw_unfinished_attempt, generate_problems
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
        assert split_of_key(swapped.key) == "test"


def test_unfinished_attempt_leaves_out_one_number():
    problems = generate_problems(CountdownConfig(2, 5), 200, 0, "train")
    for problem in problems:
        used = Counter(map(int, re.findall(r"\d+", draw_unfinished_attempt(problem, "+-", random.Random(0)))))
        missing = Counter(problem.numbers) - used
        assert missing.total() == 1 and not used - Counter(problem.numbers)


def test_exhausted_space_says_how_many_there_are():
    config = CountdownConfig(min_numbers=2, max_numbers=2, max_value=3, operators="+")
    # 1+1, 1+2, 1+3, 2+2, 2+3, 3+3 are all there is, over both splits.
    with pytest.raises(
        ValueError, match=r"^count=7 train problems do not exist .* only [1-6] were found; ask for fewer"
    ):
        generate_problems(config, 7, 0, "train")


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        # The smallest sum is 66.
        (dict(min_numbers=6, max_numbers=6, min_value=11, max_value=54, operators="+"), "train"),
        # The largest is 30.
        (dict(max_value=10, min_target=31, operators="+-"), "train"),
        # Two equal numbers without a rest: 0 or 1.
        (dict(min_numbers=2, max_numbers=2, min_value=9, max_value=9, min_target=2, operators="-/"), "train"),
        # 1+1 is all there is, and belongs to the other split.
        (dict(min_numbers=2, max_numbers=2, max_value=1, operators="+"), "test"),
        # Possible, and so rare that none comes up: 5 in 10^11 draws.
        (dict(min_numbers=6, max_numbers=6, max_value=1000, operators="+"), "test"),
    ],
)
def test_a_configuration_without_problems_is_refused_by_name_after_so_many_draws(changes, split, monkeypatch):
    draws = Counter()
    draw = generator._draw_problem
    monkeypatch.setattr(generator, "_draw_problem", lambda *arguments: draws.update(["draw"]) or draw(*arguments))
    config = CountdownConfig(**changes)
    with pytest.raises(ValueError, match=rf"^no {split} problem came up in 20000 draws from ") as refused:
        generate_problems(config, 10, 0, split)
    assert draws.total() == generator.MAX_FRUITLESS_DRAWS
    message = str(refused.value)
    assert repr(config) in message and "raise max_target, lower min_target" in message
    for key in ("min_numbers", "max_numbers", "min_value", "max_value", "operators"):
        assert f"{key}=" in message and key in message.rpartition(";")[2]


def test_the_command_refuses_a_configuration_without_problems_in_one_line(tmp_path):
    options = ["operators=+", "min_numbers=6", "max_numbers=6", "min_value=11", "max_value=54"]
    words = [word for option in options for word in ("--option", option)]
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(
        app, ["data", "build", "countdown", "--out", str(tmp_path / "built"), *words]
    )
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert re.search(r"no train problem came up in 20000 draws .*min_value=11.*; raise max_target", done.output)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match=r"^count=-1 is negative"):
        generate_problems(CountdownConfig(), -1, 0, "train")
