"""Seeded texts to reverse."""

import random
import string
from itertools import repeat

from verl_clipx.tasks.splits import Split, draw_distinct

# No character comes twice in a text: what stands before a character is then known by that character, which a policy of
# two layers can learn. The small policy's tokenizer has one token for each letter, and for two digits in a row one too.
CHARACTERS = string.ascii_letters

MIN_LENGTH, MAX_LENGTH = 2, len(CHARACTERS)


def generate_texts(count: int, seed: int, split: Split, min_length: int, max_length: int) -> list[str]:
    """Draw different texts of different letters.

    Args:
        count: number of texts, at least 0.
        seed: same seed, same texts; the first `n` of a longer list are the list of length `n`.
        split: "train" or "test"; no text is in both, whatever the seeds.
        min_length, max_length: of a text, in letters; each length between them is as likely.

    Raises:
        ValueError: if an argument is outside its range, or there are not that many texts; the message names the key.
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
