"""Texts to write backwards, generated from a seed, as rows in verl's schema."""

import random
import string
from collections.abc import Iterator, Sequence
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
    """Draw distinct texts. No letter occurs twice in a text.

    Args:
        count: number of texts, at least 0. In messages it is `size`, the option of `rows`.
        seed: determines the texts. A shorter list is the beginning of a longer one.
        split: "train" or "test". Whatever the seeds, no text is in both.
        min_length, max_length: range of the length in letters, within 2 to 52. Lengths are drawn uniformly.

    Raises:
        ValueError: an argument is outside its range, or there are too few such texts.
    """
    if count < 0:
        raise ValueError(f"size={count!r} is not a number of texts; give 0 or more")
    most = len(CHARACTERS)
    if not 2 <= min_length <= most:
        raise ValueError(f"min_length={min_length!r} is not from 2 to {most}; give one in that range")
    if not min_length <= max_length <= most:
        raise ValueError(f"max_length={max_length!r} is not from {min_length} to {most}; give one in that range")
    rng = random.Random(f"reversal-{split}-{seed}")
    draws = _draw_texts(rng, min_length, max_length)
    # A text is its own key.
    texts = draw_distinct(draws, key=str, count=count, split=split)
    if len(texts) < count:
        raise ValueError(
            f"size={count} {split} texts of {min_length} to {max_length} letters: found {len(texts)}; ask for fewer, "
            "or raise max_length"
        )
    return texts


def _draw_texts(rng: random.Random, min_length: int, max_length: int) -> Iterator[str]:
    """Yield random texts without end."""
    while True:
        length = rng.randint(min_length, max_length)
        yield "".join(rng.sample(CHARACTERS, length))


def build_rows(texts: Sequence[str], split: str, template: str = "reversal_compact") -> list[Row]:
    """Return one row per text. Its ground truth is the text backwards."""
    return [
        {
            "data_source": "reversal",
            "prompt": template_named(template).render(text=text),
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
    """Yield texts to reverse.

    Args:
        prompt: name of the template.
        size: number of texts; None for 4096 ("train") or 256 ("test").
        seed, min_length, max_length: see `generate_texts`.

    Raises:
        ValueError: an option is outside its range, or there are too few such texts.
    """
    count = SIZES[split] if size is None else size
    texts = generate_texts(count, seed, split, min_length, max_length)
    yield from build_rows(texts, split, prompt)
