"""Command line: `python -m verl_clipx.papers.tasks.reversal.policy CACHE` prepares the tiny policy for reversal."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.reversal.dataset import CHARACTERS, MAX_LENGTH, MIN_LENGTH, build_rows, generate_texts
from verl_clipx.papers.tasks.reversal.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig
from verl_clipx.papers.tasks.tiny_policy.sampling import Cache, Seed, Threads, print_policy
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, Fit, WarmStartConfig, warm_start

# Small enough for a run of a minute, and just deep enough: the second layer looks up what the first has combined.
MODEL = ModelConfig(hidden_size=64, intermediate_size=192, num_layers=2, max_length=256)

# Short texts teach reversal in a third of the time that long ones would take.
SHORT_MIN_LENGTH = 2
SHORT_MAX_LENGTH = 14
NUM_SHORT_EXAMPLES = 8000
NUM_SHORT_FITS = 5
SHORT_FIT = WarmStartConfig(steps=200, batch_size=48, learning_rate=4e-3, model=MODEL)

# Long texts then teach length.
LONG_MIN_LENGTH = 12
LONG_MAX_LENGTH = MAX_LENGTH
NUM_LONG_EXAMPLES = 6000
NUM_LONG_FITS = 3
LONG_FIT = WarmStartConfig(steps=400, batch_size=16, learning_rate=3e-3, model=MODEL)

# The last fit teaches carelessness. Training then only has to restore a skill that the policy has, and every token of a
# rollout batch contributes to the same lesson, so that a run of a minute can show progress.
NUM_CARELESS_EXAMPLES = 6000
CARELESS_FIT = WarmStartConfig(steps=400, batch_size=16, learning_rate=1e-3, model=MODEL)

# The policy is measured on this many texts of the test split.
NUM_HELD_OUT = 256
# Tokens of a response beside the letters of its answer: the tags and the end token, and a few to spare.
MAX_TOKENS_AROUND_ANSWER = 8


def build_examples(count: int, seed: int, min_length: int, max_length: int, carelessness: float = 0.0) -> list[Example]:
    """Return demonstrations of reversal. All texts are of the training split.

    Args:
        count, seed, min_length, max_length: see `generate_texts`.
        carelessness: share of letters that are replaced by random ones, 0 to 1.

    Raises:
        ValueError: an argument is outside its range.
    """
    if not 0 <= carelessness <= 1:
        raise ValueError(f"carelessness={carelessness!r} is not a share of letters; give 0 to 1")
    rng = random.Random(f"careless-{seed}")
    rows = build_rows(generate_texts(count, seed, "train", min_length, max_length), "train")
    examples = []
    for row in rows:
        answer = _replace_letters(row["reward_model"]["ground_truth"], carelessness, rng)
        examples.append(Example(prompt=row["prompt"], response=f"<answer>{answer}</answer>"))
    return examples


def _replace_letters(text: str, share: float, rng: random.Random) -> str:
    """Return a text in which a share of the letters is replaced by random ones."""
    letters = []
    for letter in text:
        is_replaced = rng.random() < share
        letters.append(rng.choice(CHARACTERS) if is_replaced else letter)
    return "".join(letters)


def main(
    cache: Cache,
    carelessness: Annotated[
        float,
        typer.Option(
            help="Share of letters in the last demonstrations that are replaced by random ones. Training can unlearn "
            "this."
        ),
    ] = 0.35,
    min_length: Annotated[int, typer.Option(help="Letters of the shortest text.")] = MIN_LENGTH,
    max_length: Annotated[
        int,
        typer.Option(
            help=f"Letters of the longest text. With at most {SHORT_MAX_LENGTH}, the fits to long texts are left out, "
            "which makes another policy in less time."
        ),
    ] = MAX_LENGTH,
    seed: Seed = 0,
    num_threads: Threads = 1,
) -> None:
    """Fit a policy of 150,000 parameters to reversed texts and print its folder on standard output.

    A second call with the same arguments prints the folder that the first call made. The held-out scores go to
    standard error.
    """

    def prepare() -> tuple[Path, list[Row]]:
        fits = _build_fits(seed, min_length, max_length, carelessness)
        held_out = build_rows(generate_texts(NUM_HELD_OUT, seed, "test", min_length, max_length), "test")
        return warm_start(fits, cache, num_threads), held_out

    print_policy(prepare, seed, compute_score, max_new_tokens=max_length + MAX_TOKENS_AROUND_ANSWER)


def _build_fits(seed: int, min_length: int, max_length: int, carelessness: float) -> list[Fit]:
    """Return the fits to short, to long and to careless examples, in this order.

    Args:
        seed: the seed of all examples, and of the first fit to each kind of them.
        min_length, max_length: the range of the length of the careless examples' texts, in letters. With `max_length`
            up to SHORT_MAX_LENGTH, there are no fits to long examples.
        carelessness: see `build_examples`.

    Raises:
        ValueError: an argument is outside its range.
    """
    # Fits to the same examples have different seeds, so that each gets them in another order.
    fits = []
    short_examples = build_examples(NUM_SHORT_EXAMPLES, seed, SHORT_MIN_LENGTH, SHORT_MAX_LENGTH)
    for number in range(NUM_SHORT_FITS):
        fits.append((short_examples, replace(SHORT_FIT, seed=seed + number)))
    if max_length > SHORT_MAX_LENGTH:
        long_examples = build_examples(NUM_LONG_EXAMPLES, seed, LONG_MIN_LENGTH, LONG_MAX_LENGTH)
        for number in range(NUM_LONG_FITS):
            fits.append((long_examples, replace(LONG_FIT, seed=seed + number)))
    careless_examples = build_examples(NUM_CARELESS_EXAMPLES, seed, min_length, max_length, carelessness)
    fits.append((careless_examples, replace(CARELESS_FIT, seed=seed)))
    return fits


if __name__ == "__main__":
    typer.run(main)
