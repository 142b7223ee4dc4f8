"""Generates Countdown problems from a seed; all of them are solvable by construction.

A problem is a multiset of numbers and a target. The generator first draws an expression, whose value is the target, so
every problem comes with a solution. As in the game, intermediate results are whole numbers and never negative.
"""

import operator
import random
from dataclasses import dataclass
from itertools import repeat

from verl_clipx.papers.tasks.splits import Split, draw_distinct

OPERATORS = "+-*/"

# The operators' precedence. A number, which has no operator, never needs parentheses.
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}
_FUNCTIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class CountdownConfig:
    """Difficulty of the generated problems: ranges of how many numbers there are, of each number, and of the target.

    A policy of about a million parameters learns the default problems in minutes. The papers' problems have 3 or 4
    numbers up to 99 and all four operators.

    Args:
        operators: operators from which solutions are built, as distinct characters of "+-*/". Answers may use all four.

    Raises:
        ValueError: a value is of the wrong type or outside its range; the message names the key and the range.
    """

    min_numbers: int = 3
    max_numbers: int = 3
    min_value: int = 1
    max_value: int = 20
    min_target: int = 1
    max_target: int = 60
    operators: str = "+-"

    def __post_init__(self) -> None:
        for quantity, lowest, highest in (("numbers", 2, 6), ("value", 1, 1000), ("target", 0, 100_000)):
            low = lowest
            for key in (f"min_{quantity}", f"max_{quantity}"):
                value = getattr(self, key)
                if type(value) is not int or not low <= value <= highest:
                    raise ValueError(
                        f"{key}={value!r} is not an integer from {low} to {highest}; give one in that range"
                    )
                low = value
        operators = self.operators
        if not isinstance(operators, str) or not operators or len(set(operators) & set(OPERATORS)) != len(operators):
            raise ValueError(f"operators={operators!r} is not a set of distinct characters of {OPERATORS!r}; list some")


@dataclass(frozen=True)
class Problem:
    """One Countdown problem; the solution uses each number once and equals the target."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """The sorted numbers and the target, which are equal for problems that count as the same."""
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True)
class _Term:
    """An expression with its value.

    Args:
        outermost: the operator that is computed last; "" for a number.
    """

    value: int
    text: str
    outermost: str


def generate_problems(config: CountdownConfig, count: int, seed: int, split: Split) -> list[Problem]:
    """Draw distinct problems of one split.

    Args:
        seed: determines the problems. A shorter list is the beginning of a longer one.

    Raises:
        ValueError: `count` is negative, or there are too few problems with this configuration.
    """
    if count < 0:
        raise ValueError(f"count={count!r} is negative; ask for 0 problems or more")
    rng = random.Random(f"countdown-{split}-{seed}")
    # An endless iterator.
    draws = (_draw_problem(config, rng) for _ in repeat(None))
    problems = draw_distinct(draws, operator.attrgetter("key"), count, split)
    if len(problems) < count:
        raise ValueError(
            f"count={count}: only {len(problems)} {split} problems came up with {config}; ask for fewer, raise "
            "max_target, lower min_target, or allow other numbers (min_numbers, max_numbers, min_value, max_value) or "
            "more operators"
        )
    return problems


def draw_unfinished_attempt(problem: Problem, operators: str, rng: random.Random) -> str:
    """Return a random expression without one of the problem's numbers, which the reward counts as wrong.

    Args:
        problem: a problem with at least two numbers.
        operators: operators that combine the numbers. Without +, - or *, the search may not end.
    """
    numbers = list(problem.numbers)
    while True:
        rng.shuffle(numbers)
        term = _draw_expression(numbers[:-1], operators, rng)
        if term is not None:
            return term.text


def _draw_problem(config: CountdownConfig, rng: random.Random) -> Problem | None:
    """Draw numbers and an expression of them. Return None if its value, or one on the way to it, is not allowed."""
    size = rng.randint(config.min_numbers, config.max_numbers)
    numbers = [rng.randint(config.min_value, config.max_value) for _ in range(size)]
    term = _draw_expression(numbers, config.operators, rng)
    if term is None or not config.min_target <= term.value <= config.max_target:
        return None
    # The prompt must not give away the order in which the solution uses the numbers.
    rng.shuffle(numbers)
    return Problem(numbers=tuple(numbers), target=term.value, solution=term.text)


def _draw_expression(numbers: list[int], operators: str, rng: random.Random) -> _Term | None:
    """Draw an expression that uses the numbers in this order. Return None as `_combine` does."""
    if len(numbers) == 1:
        return _Term(value=numbers[0], text=str(numbers[0]), outermost="")
    cut = rng.randint(1, len(numbers) - 1)
    left = _draw_expression(numbers[:cut], operators, rng)
    right = _draw_expression(numbers[cut:], operators, rng)
    if left is None or right is None:
        return None
    return _combine(left, rng.choice(operators), right)


def _combine(left: _Term, sign: str, right: _Term) -> _Term | None:
    """Return two expressions joined by an operator; None if the value is negative or no whole number.

    Args:
        sign: the operator.
    """
    if sign == "/" and (right.value == 0 or left.value % right.value != 0):
        return None
    value = _FUNCTIONS[sign](left.value, right.value)
    if value < 0:
        return None
    precedence = _PRECEDENCE[sign]
    left_precedence = _PRECEDENCE[left.outermost]
    right_precedence = _PRECEDENCE[right.outermost]
    left_text = left.text
    if left_precedence < precedence:
        left_text = f"({left_text})"
    right_text = right.text
    # On the right of - and /, an operator of the same precedence needs parentheses, too.
    if right_precedence < precedence or (right_precedence == precedence and sign in "-/"):
        right_text = f"({right_text})"
    return _Term(value=value, text=f"{left_text}{sign}{right_text}", outermost=sign)
