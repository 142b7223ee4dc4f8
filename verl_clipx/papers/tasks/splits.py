"""Splits generated problems into training and test. A problem's split depends only on the problem."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

Split = Literal["train", "test"]

# The share of problems in "test".
TEST_SHARE = 0.1

# After so many draws in a row without a new problem, the search ends. There are no more, or they are too rare.
MAX_FRUITLESS_DRAWS = 20_000

ProblemT = TypeVar("ProblemT")


def split_of_key(key: object) -> Split:
    """Return the split of a problem, by a hash of its key. A tenth of all problems are in "test".

    The split depends only on the key. Therefore a problem that is generated from two seeds is in the same split of both
    data sets.

    Args:
        key: equal for problems that count as the same. Equal keys must have the same `repr`, in every process.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"


def draw_distinct(
    draws: Iterator[ProblemT | None], key: Callable[[ProblemT], Any], count: int, split: Split
) -> list[ProblemT]:
    """Draw problems of one split, all with different keys, until there are enough.

    Args:
        draws: an endless iterator. None stands for a draw that failed.
        key: returns a problem's key; see `split_of_key`.

    Returns:
        `count` problems; fewer if `MAX_FRUITLESS_DRAWS` draws in a row give no new one of this split.
    """
    problems: dict[Any, ProblemT] = {}
    num_fruitless_draws = 0
    while len(problems) < count and num_fruitless_draws < MAX_FRUITLESS_DRAWS:
        problem = next(draws)
        # The draw counts as fruitless until the problem proves to be a new one.
        num_fruitless_draws += 1
        if problem is None:
            continue
        problem_key = key(problem)
        if problem_key in problems or split_of_key(problem_key) != split:
            continue
        problems[problem_key] = problem
        num_fruitless_draws = 0
    return list(problems.values())
