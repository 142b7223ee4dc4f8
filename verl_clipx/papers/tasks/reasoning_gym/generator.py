"""Generates problems of reasoning-gym, in two splits that share none."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from verl_clipx.common.extras import needs_tool

SPLITS = ("train", "test")

# One problem in eight belongs to the test split.
TEST_SHARE = 8

# reasoning-gym draws problem i with seed + i: seeds this far apart draw different ones.
SEED_STRIDE = 10_000_000

# Seed of the solved problem that prompts show.
EXAMPLE_SEED = 7

# A generator with few different problems repeats itself, so the search ends after this many draws per wanted problem.
DRAWS_PER_PROBLEM = 50

_WORD_OR_SIGN = re.compile(r"\w+|[^\w\s]")

Entry = dict[str, Any]
"""A problem of reasoning-gym: `question`, `answer`, `metadata`."""


def reasoning_gym() -> Any:
    """Return the package, which is imported only when it is needed, because that takes seconds.

    Raises:
        ModuleNotFoundError: the package is missing; the message says how to install it.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        # Perhaps only one of its requirements is missing; the extra installs all of them.
        raise ModuleNotFoundError(
            needs_tool("a task of reasoning-gym", "reasoning_gym"), name="reasoning_gym"
        ) from error
    return reasoning_gym


def problem_key(question: str) -> str:
    """Return a problem's sorted words and signs, so that 3 + 4 and 4 + 3 count as the same problem."""
    return " ".join(sorted(_WORD_OR_SIGN.findall(question.casefold())))


def split_of(question: str) -> str:
    """Return a problem's split, which does not depend on the seed or the size with which it was drawn."""
    digest = hashlib.sha256(problem_key(question).encode()).digest()
    return SPLITS[int.from_bytes(digest[:4], "big") % TEST_SHARE == 0]


def generate_problems(generator: str, settings: dict[str, Any], size: int, seed: int, split: str) -> Iterator[Entry]:
    """Yield different problems of one split.

    Args:
        size: number of problems, at least 1.
        seed: determines the problems; at least 0.

    Raises:
        ModuleNotFoundError: reasoning-gym is missing.
        ValueError: a setting is unknown or out of its range, or there are too few problems.
    """
    if size < 1:
        raise ValueError(f"size={size} is below 1; verl cannot load an empty file")
    if seed < 0:
        raise ValueError(f"seed={seed} is below 0; give a whole number from 0 on")
    draws = DRAWS_PER_PROBLEM * (size + 10)
    drawn = _create(generator, settings, draws, seed * SEED_STRIDE)
    # The example is in every prompt, so as a problem its answer would be known.
    seen = {problem_key(solved_example(generator, settings)["question"])}

    found = 0
    for index in range(draws):
        entry = drawn[index]
        key = problem_key(entry["question"])
        if key not in seen and split_of(entry["question"]) == split:
            yield entry
            found += 1
            if found == size:
                return
        seen.add(key)
    raise ValueError(
        f"size={size}: {generator} with settings={settings} has only {found} different problems in the split "
        f"{split!r} (of {draws} drawn); ask for fewer or for harder ones"
    )


def solved_example(generator: str, settings: dict[str, Any]) -> Entry:
    """Return the problem that prompts show solved. It depends only on the arguments and is in neither split."""
    return _create(generator, settings, 1, EXAMPLE_SEED)[0]


def _create(generator: str, settings: dict[str, Any], size: int, seed: int) -> Any:
    try:
        return reasoning_gym().create_dataset(generator, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        # TypeError: no such field; AssertionError: out of its range.
        raise ValueError(f"settings={settings} are not valid for reasoning-gym's {generator}: {error}") from error
