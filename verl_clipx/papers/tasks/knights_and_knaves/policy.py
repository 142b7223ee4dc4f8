"""Command line: `python -m verl_clipx.papers.tasks.knights_and_knaves.policy CACHE` prepares its tiny policy."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.knights_and_knaves.dataset import TINY_OPERATORS, tiny_rows
from verl_clipx.papers.tasks.knights_and_knaves.generator import draw_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.prompt import build_compact_prompt, build_compact_response
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle
from verl_clipx.papers.tasks.knights_and_knaves.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.sampling import Cache, Mistakes, Seed, Steps, Threads, print_policy
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, WarmStartConfig, skill_and_habit, warm_start

# At Countdown's learning rate of 3e-3, the policy learns the form of an answer but hardly the solution. At 1.5e-3 it
# solves twice as many puzzles.
DEFAULT_FIT = WarmStartConfig(steps=800, learning_rate=1.5e-3)

HABIT_STEPS = 40

# Puzzles of two people are easier, and there are few different ones.
SHARE_OF_TWO = 0.2

# Letter by letter, a response about three people takes 60 tokens, of which only three matter. With these words it takes
# 12.
WORDS = ("<think>", "</think>", " is a knight", " is a knave")


def build_puzzle_tokenizer() -> Qwen2Tokenizer:
    """Build the tiny policy's tokenizer, with each of `WORDS` as an ordinary token that decoding keeps."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return tokenizer


def draw_training_puzzles(count: int, seed: int) -> list[Puzzle]:
    """Draw puzzles of two and three people from the training split.

    The same puzzle may appear again with its people in another order or its statements worded differently: for a policy
    this small, that is another example. Whatever the seed, no puzzle is from the test split.
    """
    rng = random.Random(f"sizes-{seed}")
    draws_by_people = {people: draw_puzzles(people, seed, "train", TINY_OPERATORS) for people in (2, 3)}
    puzzles = []
    for _ in range(count):
        people = 2 if rng.random() < SHARE_OF_TWO else 3
        puzzles.append(next(draws_by_people[people]))
    return puzzles


def build_examples(puzzles: Sequence[Puzzle], mistakes: float, seed: int) -> list[Example]:
    """Return one demonstration per puzzle. Some leave out the last person, so that the reward cannot read them.

    Args:
        mistakes: the share of those that leave out a person, 0 to 1.
        seed: determines which these are.
    """
    rng = random.Random(f"mistakes-{seed}")
    examples = []
    for puzzle in puzzles:
        is_mistake = rng.random() < mistakes
        solution = puzzle.solution[:-1] if is_mistake else puzzle.solution
        prompt = build_compact_prompt(puzzle.statements)
        examples.append(Example(prompt=prompt, response=build_compact_response(solution)))
    return examples


def fit_policy(
    puzzles: Sequence[Puzzle], mistakes: float, config: WarmStartConfig, cache: Path, num_threads: int
) -> Path:
    """Return the folder of the tiny policy after its fits to demonstrations, of which the last ones have mistakes.

    See `skill_and_habit`, `build_examples` and `warm_start`.
    """

    def examples(share: float) -> list[Example]:
        return build_examples(puzzles, share, config.seed)

    fits = skill_and_habit(examples, mistakes, config, HABIT_STEPS)
    return warm_start(fits, cache, num_threads, build_puzzle_tokenizer(), "knights_and_knaves")


def main(
    cache: Cache,
    examples: Annotated[int, typer.Option(help="Number of solved puzzles to learn from.")] = 26_000,
    mistakes: Mistakes = 0.3,
    steps: Steps = DEFAULT_FIT.steps,
    seed: Seed = 0,
    num_threads: Threads = 2,
) -> None:
    """Fit a policy of about a million parameters to solved puzzles and print its folder on standard output.

    A second call with the same arguments prints the folder that the first call made. Held-out figures go to
    standard error.
    """

    def prepare() -> tuple[Path, list[Row]]:
        settings = replace(DEFAULT_FIT, steps=steps, seed=seed)
        folder = fit_policy(draw_training_puzzles(examples, seed), mistakes, settings, cache, num_threads)
        return folder, list(tiny_rows(None, split="test", prompt="kk_compact"))

    print_policy(prepare, seed, compute_score)


if __name__ == "__main__":
    typer.run(main)
