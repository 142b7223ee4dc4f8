"""Splits generated problems into training and test: a problem's split depends only on the problem."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

Split = Literal["train", "test"]

TEST_SHARE = 0.1

# After this many draws in a row without a new problem, the search ends: there are no more, or they are too rare.
MAX_FRUITLESS_DRAWS = 20_000

Problem = TypeVar("Problem")


def split_of_key(key: object) -> Split:
    """Return the split of a problem: a hash of its key puts a tenth of all problems into "test", whatever the seed.

    Args:
        key: equal for problems that count as the same. Its `repr` must be the same in every process.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"


def draw_distinct(
    draws: Iterator[Problem | None], key: Callable[[Problem], Any], count: int, split: Split
) -> list[Problem]:
    """Draw problems of one split, all with different keys, until there are enough.

    Args:
        draws: an endless iterator; None stands for a draw that failed.
        key: returns a problem's key, see `split_of_key`.

    Returns:
        `count` problems; fewer if `MAX_FRUITLESS_DRAWS` draws in a row yield no new one.
    """
    problems: dict[Any, Problem] = {}
    fruitless = 0
    while len(problems) < count and fruitless < MAX_FRUITLESS_DRAWS:
        drawn = next(draws)
        own = None if drawn is None else key(drawn)
        if drawn is None or own in problems or split_of_key(own) != split:
            fruitless += 1
        else:
            problems[own] = drawn
            fruitless = 0
    return list(problems.values())
