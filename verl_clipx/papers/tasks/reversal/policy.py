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
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, WarmStartConfig, warm_start

# Small enough for a run of a minute, and just deep enough: the second layer looks up what the first has combined.
MODEL = ModelConfig(hidden_size=64, intermediate_size=192, num_layers=2, max_length=256)

# Short texts teach reversal in a third of the time that long ones would take. Long ones then teach length.
SHORT = (2, 14)
LONG = (12, MAX_LENGTH)
SHORT_FIT = WarmStartConfig(steps=200, batch_size=48, learning_rate=4e-3, model=MODEL)
LONG_FIT = WarmStartConfig(steps=400, batch_size=16, learning_rate=3e-3, model=MODEL)
SHORT_FITS = 5
LONG_FITS = 3

# The last fit teaches carelessness. Training then only has to restore a skill that the policy has, and every token of a
# rollout batch contributes to the same lesson, so that a run of a minute can show progress.
CARELESS_FIT = WarmStartConfig(steps=400, batch_size=16, learning_rate=1e-3, model=MODEL)


def build_examples(count: int, seed: int, min_length: int, max_length: int, carelessness: float = 0.0) -> list[Example]:
    """Return demonstrations, all of the training split.

    Args:
        carelessness: share of letters that are replaced by random ones, 0 to 1.

    Raises:
        ValueError: an argument is outside its range.
    """
    if not 0 <= carelessness <= 1:
        raise ValueError(f"carelessness={carelessness!r} is not a share of letters; give 0 to 1")
    rng = random.Random(f"careless-{seed}")

    def careless(text: str) -> str:
        return "".join(rng.choice(CHARACTERS) if rng.random() < carelessness else letter for letter in text)

    solved = build_rows(generate_texts(count, seed, "train", min_length, max_length), "train")
    return [
        Example(row["prompt"], f"<answer>{careless(row['reward_model']['ground_truth'])}</answer>") for row in solved
    ]


def main(
    cache: Cache,
    carelessness: Annotated[
        float, typer.Option(help="Share of wrong letters in the last demonstrations, which training can unlearn.")
    ] = 0.35,
    min_length: Annotated[int, typer.Option(help="Letters of the shortest text.")] = MIN_LENGTH,
    max_length: Annotated[
        int, typer.Option(help="Letters of the longest text; up to 14 make another, cheaper policy.")
    ] = MAX_LENGTH,
    seed: Seed = 0,
    num_threads: Threads = 1,
) -> None:
    """Fit a policy of 150,000 parameters to reversed texts and print its folder on standard output.

    A second call with the same arguments returns the finished folder. The held-out scores go to standard error.
    """

    def prepare() -> tuple[Path, list[Row]]:
        short = build_examples(8000, seed, *SHORT)
        long = build_examples(6000, seed, *LONG)
        last = build_examples(6000, seed, min_length, max_length, carelessness)
        fits = [(short, replace(SHORT_FIT, seed=seed + part)) for part in range(SHORT_FITS)]
        if max_length > SHORT[1]:
            fits += [(long, replace(LONG_FIT, seed=seed + part)) for part in range(LONG_FITS)]
        fits += [(last, replace(CARELESS_FIT, seed=seed))]
        held_out = build_rows(generate_texts(256, seed, "test", min_length, max_length), "test")
        return warm_start(fits, cache, num_threads), held_out

    print_policy(prepare, seed, compute_score, max_length + 8)


if __name__ == "__main__":
    typer.run(main)
