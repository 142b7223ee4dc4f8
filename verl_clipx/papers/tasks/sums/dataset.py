"""Sums of two numbers below 100 as rows in verl's schema."""

import random
from collections.abc import Iterator
from pathlib import Path

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.splits import Split, draw_distinct
from verl_clipx.papers.tasks.templates import template_named

SIZES: dict[Split, int] = {"train": 512, "test": 64}


def rows(source: Path | None, *, split: str, prompt: str, size: int | None = None, seed: int = 0) -> Iterator[Row]:
    """Yield sums; 3 + 14 and 14 + 3 count as the same one, and the two splits share none.

    Half of the draws are of numbers below 10. There are few different sums of these.

    Args:
        prompt: name of the template.
        size: number of sums, at least 1; None for 512 ("train") or 64 ("test").
        seed: determines the sums.

    Raises:
        ValueError: `size` is out of range, or there are too few such sums.
    """
    count = SIZES[split] if size is None else size
    rng = random.Random(f"sums-{split}-{seed}")
    sums = draw_distinct(_draw_pairs(rng), _key_of_pair, max(count, 0), split)
    if count < 1 or len(sums) < count:
        raise ValueError(f"size={count}: there are 1 to {len(sums) or 'some 500'} {split} sums; ask for fewer")
    for index, (first, second) in enumerate(sums):
        yield {
            "data_source": "sums",
            "prompt": template_named(prompt).render(first=first, second=second),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(first + second)},
            "extra_info": {"index": index, "split": split},
        }


def _draw_pairs(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield random pairs of numbers without end."""
    while True:
        limit = rng.choice((10, 100))
        first = rng.randrange(limit)
        second = rng.randrange(limit)
        yield first, second


def _key_of_pair(pair: tuple[int, int]) -> tuple[int, ...]:
    """Return a key that is equal for pairs of the same numbers in any order."""
    return tuple(sorted(pair))
