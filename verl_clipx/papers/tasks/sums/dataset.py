"""Sums of two numbers below 100 as rows in verl's schema."""

import random
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.splits import Split, draw_distinct
from verl_clipx.papers.tasks.templates import template_named

SIZES: dict[Split, int] = {"train": 512, "test": 64}


def rows(source: Path | None, *, split: str, prompt: str, size: int | None = None, seed: int = 0) -> Iterator[Row]:
    """Yield sums; 3 + 14 and 14 + 3 count as the same one, and the two splits share none.

    Half of the draws are of numbers below 10, of which there are few different sums.

    Args:
        size: number of sums, at least 1; None for 512 ("train") or 64 ("test").

    Raises:
        ValueError: `size` is out of range, or there are too few such sums.
    """
    count = SIZES[split] if size is None else size
    rng = random.Random(f"sums-{split}-{seed}")
    below = (rng.choice((10, 100)) for _ in repeat(None))
    draws = ((rng.randrange(limit), rng.randrange(limit)) for limit in below)
    sums = draw_distinct(draws, lambda pair: tuple(sorted(pair)), max(count, 0), split)
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
