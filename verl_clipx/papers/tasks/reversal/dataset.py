"""Texts to write backwards, generated from a seed, as rows in verl's schema."""

import random
import string
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.splits import Split, draw_distinct
from verl_clipx.papers.tasks.templates import template_named

# No character occurs twice in a text. Each character then determines the one before it, which a policy of two layers
# can learn to look up. There are no digits, because the small policy's tokenizer makes one token of two digits.
CHARACTERS = string.ascii_letters

# Default lengths of a text. Answers have 43 to 51 tokens, including the tags and the end token.
MIN_LENGTH = 40
MAX_LENGTH = 48

SIZES: dict[Split, int] = {"train": 4096, "test": 256}


def generate_texts(count: int, seed: int, split: Split, min_length: int, max_length: int) -> list[str]:
    """Draw distinct texts, in each of which all letters differ.

    Args:
        count: number of texts, at least 0.
        seed: determines the texts. A shorter list is the beginning of a longer one.
        split: "train" or "test". Whatever the seeds, no text is in both.
        min_length, max_length: range of the length in letters, from which lengths are drawn uniformly.

    Raises:
        ValueError: an argument is outside its range, or there are too few such texts; the message names the key.
    """
    if count < 0:
        raise ValueError(f"size={count!r} is not a number of texts; give 0 or more")
    for key, value, least in (("min_length", min_length, 2), ("max_length", max_length, min_length)):
        if not least <= value <= len(CHARACTERS):
            raise ValueError(f"{key}={value!r} is not from {least} to {len(CHARACTERS)}; give one in that range")
    rng = random.Random(f"reversal-{split}-{seed}")
    draws = ("".join(rng.sample(CHARACTERS, rng.randint(min_length, max_length))) for _ in repeat(None))
    texts = draw_distinct(draws, str, count, split)
    if len(texts) < count:
        raise ValueError(
            f"size={count} {split} texts of {min_length} to {max_length} letters: found {len(texts)}; ask for fewer, "
            "or raise max_length"
        )
    return texts


def build_rows(texts: Sequence[str], split: str, prompt: str = "reversal_compact") -> list[Row]:
    """Return one row per text; its ground truth is the text backwards."""
    return [
        {
            "data_source": "reversal",
            "prompt": template_named(prompt).render(text=text),
            "ability": "text",
            "reward_model": {"style": "rule", "ground_truth": text[::-1]},
            "extra_info": {"index": index, "split": split},
        }
        for index, text in enumerate(texts)
    ]


def rows(
    source: Path | None,
    *,
    split: str,
    prompt: str,
    size: int | None = None,
    seed: int = 0,
    min_length: int = MIN_LENGTH,
    max_length: int = MAX_LENGTH,
) -> Iterator[Row]:
    """Yield texts to reverse, by default 4096 ("train") or 256 ("test"); see `generate_texts`."""
    count = SIZES[split] if size is None else size
    yield from build_rows(generate_texts(count, seed, split, min_length, max_length), split, prompt)
