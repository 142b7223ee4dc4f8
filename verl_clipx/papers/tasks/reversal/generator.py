"""Generates texts to reverse from a seed."""

import random
import string
from itertools import repeat

from verl_clipx.papers.tasks.splits import Split, draw_distinct

# No character occurs twice in a text. Each character then determines the one before it, which a policy of two layers
# can learn to look up. There are no digits, because the small policy's tokenizer makes one token of two digits.
CHARACTERS = string.ascii_letters

MIN_LENGTH, MAX_LENGTH = 2, len(CHARACTERS)


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
    if type(count) is not int or count < 0:
        raise ValueError(f"size={count!r} is not a number of texts; give 0 or more")
    for key, value, least in (("min_length", min_length, MIN_LENGTH), ("max_length", max_length, min_length)):
        if type(value) is not int or not least <= value <= MAX_LENGTH:
            raise ValueError(f"{key}={value!r} is not an integer from {least} to {MAX_LENGTH}; give one in that range")
    rng = random.Random(f"reversal-{split}-{seed}")
    draws = ("".join(rng.sample(CHARACTERS, rng.randint(min_length, max_length))) for _ in repeat(None))
    texts = draw_distinct(draws, str, count, split)
    if len(texts) < count:
        raise ValueError(
            f"size={count} {split} texts of {min_length} to {max_length} letters: found {len(texts)}; ask for fewer, "
            "or raise max_length"
        )
    return texts
