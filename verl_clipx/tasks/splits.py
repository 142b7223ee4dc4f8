"""Training and test problems of generated data sets: a problem's split follows from the problem alone."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

TEST_SHARE = 0.1

MAX_FRUITLESS_DRAWS = 20_000
"""Draws without a new problem after which there are no more, or they are that rare."""

Problem = TypeVar("Problem")


def split_of_key(key: object) -> Split:
    """Return the split of the problems with a key: a hash of it puts a tenth into "test".

    No two runs, seeds or stages can put one problem in both.

    Args:
        key: what makes two problems the same; of values whose `repr` is the same in every process.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"


def draw_distinct(
    draws: Iterator[Problem | None], key: Callable[[Problem], Any], count: int, split: Split
) -> list[Problem]:
    """Draw problems of one split until there are enough.

    Args:
        draws: without end; None for one that came to nothing.
        key: what makes two problems the same, see `split_of_key`.

    Returns:
        `count` problems, no two with the same key; fewer if `MAX_FRUITLESS_DRAWS` in a row bring no further one.
    """
    found: dict[Any, Problem] = {}
    fruitless = 0
    while len(found) < count and fruitless < MAX_FRUITLESS_DRAWS:
        drawn = next(draws)
        own = None if drawn is None else key(drawn)
        if drawn is None or own in found or split_of_key(own) != split:
            fruitless += 1
        else:
            found[own], fruitless = drawn, 0
    return list(found.values())
