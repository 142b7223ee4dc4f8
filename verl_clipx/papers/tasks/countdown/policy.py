"""Command line: `python -m verl_clipx.papers.tasks.countdown.policy CACHE` prepares the tiny policy for Countdown."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.papers.tasks.countdown.dataset import build_prompt, build_rows
from verl_clipx.papers.tasks.countdown.generator import (
    CountdownConfig,
    Problem,
    draw_unfinished_attempt,
    generate_problems,
)
from verl_clipx.papers.tasks.countdown.reward import compute_score
from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.tiny_policy.sampling import Cache, Mistakes, Seed, Steps, Threads, print_policy
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, WarmStartConfig, skill_and_habit, warm_start

DEFAULT = CountdownConfig()
HABIT_STEPS = 60


def fit_policy(
    problems: Sequence[Problem], operators: str, mistakes: float, config: WarmStartConfig, cache: Path, num_threads: int
) -> Path:
    """Return the folder of the tiny policy after its fits to demonstrations, of which the last ones have mistakes.

    See `skill_and_habit`, `build_examples` and `warm_start`.
    """

    def examples(share: float) -> list[Example]:
        return build_examples(problems, operators, share, config.seed)

    return warm_start(skill_and_habit(examples, mistakes, config, HABIT_STEPS), cache, num_threads)


def build_examples(problems: Sequence[Problem], operators: str, mistakes: float, seed: int) -> list[Example]:
    """Return one demonstration per problem. Some are wrong, because they leave out a number.

    Args:
        operators: the operators of the wrong ones.
        mistakes: the share of the wrong ones, 0 to 1.
        seed: determines which are wrong, and how.
    """
    rng = random.Random(f"mistakes-{seed}")
    examples = []
    for problem in problems:
        is_mistake = rng.random() < mistakes
        expression = draw_unfinished_attempt(problem, operators, rng) if is_mistake else problem.solution
        prompt = build_prompt(problem.numbers, problem.target)
        examples.append(Example(prompt=prompt, response=f"<answer>{expression}</answer>"))
    return examples


def main(
    cache: Cache,
    examples: Annotated[int, typer.Option(help="Number of solved problems to learn from.")] = 5000,
    mistakes: Mistakes = 0.5,
    steps: Steps = WarmStartConfig.steps,
    seed: Seed = 0,
    num_threads: Threads = 2,
    min_numbers: Annotated[int, typer.Option(help="Fewest numbers in a problem.")] = DEFAULT.min_numbers,
    max_numbers: Annotated[int, typer.Option(help="Most numbers in a problem.")] = DEFAULT.max_numbers,
) -> None:
    """Fit a policy of about a million parameters to solved problems and print its folder on standard output.

    A second call with the same arguments prints the folder that the first call made. The held-out reward goes to
    standard error.
    """

    def prepare() -> tuple[Path, list[Row]]:
        task = CountdownConfig(min_numbers, max_numbers)
        fit = WarmStartConfig(steps=steps, seed=seed)
        solved = generate_problems(task, examples, seed, "train")
        held_out = build_rows(generate_problems(task, 256, seed, "test"), "test")
        return fit_policy(solved, task.operators, mistakes, fit, cache, num_threads), held_out

    print_policy(prepare, seed, compute_score)


if __name__ == "__main__":
    typer.run(main)
