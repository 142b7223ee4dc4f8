"""Seeded Countdown problems that are solvable by construction.

A problem is a multiset of numbers and a target; the generator draws an expression first and reads the target off it,
so that every problem comes with one solution. As in the game, intermediate results are whole and never negative.
"""

import random
from dataclasses import dataclass
from itertools import repeat

from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.splits import MAX_FRUITLESS_DRAWS, Split, draw_distinct

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}


@dataclass(frozen=True)
class Problem:
    """One Countdown problem.

    Attributes:
        solution: one expression that uses each number once and equals the target.
    """

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two problems the same: the sorted numbers and the target."""
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True)
class _Term:
    value: int
    text: str
    operator: str  # the outermost operator, "" for a number


def generate_problems(config: CountdownConfig, count: int, seed: int, split: Split) -> list[Problem]:
    """Draw distinct problems of one split.

    Args:
        seed: same seed, same problems; the first `n` of a longer list are the list of length `n`.

    Raises:
        ValueError: if `count` is negative, or the configuration holds fewer problems, or they are that rare.
    """
    if count < 0:
        raise ValueError(f"count={count!r} is negative; ask for 0 problems or more")
    rng = random.Random(f"countdown-{split}-{seed}")
    draws = (_draw_problem(config, rng) for _ in repeat(None))
    problems = draw_distinct(draws, lambda problem: problem.key, count, split)
    if len(problems) < count:
        raise ValueError(_too_few(config, count, split, len(problems)))
    return problems


def _too_few(config: CountdownConfig, count: int, split: Split, found: int) -> str:
    """What a refusal says of a configuration that holds no problem, or fewer than were asked for."""
    more = (
        "raise max_target, lower min_target, allow other numbers (min_numbers, max_numbers, min_value, max_value) "
        "or more operators"
    )
    if not found:
        return f"no {split} problem came up in {MAX_FRUITLESS_DRAWS} draws from {config}; {more}"
    return (
        f"count={count} {split} problems do not exist with {config}: only {found} were found; ask for fewer, or {more}"
    )


def draw_unfinished_attempt(problem: Problem, operators: str, rng: random.Random) -> str:
    """Return a random expression that leaves out one of a problem's numbers, which no reward accepts.

    Args:
        problem: a problem with at least two numbers.
        operators: what to combine the numbers by; at least one of +, - and *, or the search may not end.
    """
    numbers = list(problem.numbers)
    while True:
        rng.shuffle(numbers)
        term = _draw_expression(numbers[:-1], operators, rng)
        if term is not None:
            return term.text


def _draw_problem(config: CountdownConfig, rng: random.Random) -> Problem | None:
    size = rng.randint(config.min_numbers, config.max_numbers)
    numbers = [rng.randint(config.min_value, config.max_value) for _ in range(size)]
    term = _draw_expression(numbers, config.operators, rng)
    if term is None or not config.min_target <= term.value <= config.max_target:
        return None
    # The prompt must not give away the order in which the solution uses the numbers.
    rng.shuffle(numbers)
    return Problem(tuple(numbers), term.value, term.text)


def _draw_expression(numbers: list[int], operators: str, rng: random.Random) -> _Term | None:
    if len(numbers) == 1:
        return _Term(numbers[0], str(numbers[0]), "")
    cut = rng.randint(1, len(numbers) - 1)
    left = _draw_expression(numbers[:cut], operators, rng)
    right = _draw_expression(numbers[cut:], operators, rng)
    if left is None or right is None:
        return None
    return _combine(left, rng.choice(operators), right)


def _combine(left: _Term, operator: str, right: _Term) -> _Term | None:
    if operator == "+":
        value = left.value + right.value
    elif operator == "-":
        value = left.value - right.value
    elif operator == "*":
        value = left.value * right.value
    elif right.value == 0 or left.value % right.value:
        return None
    else:
        value = left.value // right.value
    if value < 0:
        return None
    level = _PRECEDENCE[operator]
    left_text = f"({left.text})" if _PRECEDENCE[left.operator] < level else left.text
    # Only after - and / does an operator of the same level on the right need parentheses.
    right_level = _PRECEDENCE[right.operator]
    needs_parentheses = right_level < level or (right_level == level and operator in "-/")
    right_text = f"({right.text})" if needs_parentheses else right.text
    return _Term(value, f"{left_text}{operator}{right_text}", operator)
