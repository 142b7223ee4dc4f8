"""Command line: `python -m verl_clipx.tasks.countdown.policy CACHE` prepares the tiny policy for Countdown."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.dataset import build_rows
from verl_clipx.tasks.countdown.generator import Problem, draw_unfinished_attempt, generate_problems
from verl_clipx.tasks.countdown.prompt import build_prompt, build_response
from verl_clipx.tasks.countdown.reward import compute_score
from verl_clipx.tasks.tiny_policy.sampling import mean_scores
from verl_clipx.tasks.tiny_policy.warm_start import Example, WarmStartConfig, warm_start

DEFAULT = CountdownConfig()
DEFAULT_FIT = WarmStartConfig()

# The second fit only has to teach a habit, so it is short and gentle.
HABIT_STEPS = 60
HABIT_LEARNING_RATE = 1e-3


def fit_policy(
    problems: Sequence[Problem], operators: str, mistakes: float, config: WarmStartConfig, cache: Path, num_threads: int
) -> Path:
    """Fit the tiny policy to right demonstrations, then for a moment to some that leave out a number.

    The first fit gives it skill, the second a bad habit: its samples differ in reward, and what reinforcement learning
    has to undo first is the same for all problems.

    Args:
        operators: what the mistakes combine the numbers by.
        mistakes: share of mistakes in the second fit, 0 to 1; 0 leaves it out.
    """
    fits = [(build_examples(problems, operators, 0.0, config.seed), config)]
    if mistakes != 0:
        habit = replace(config, steps=min(HABIT_STEPS, config.steps), learning_rate=HABIT_LEARNING_RATE)
        fits.append((build_examples(problems, operators, mistakes, config.seed), habit))
    return warm_start(fits, cache, num_threads)


def build_examples(problems: Sequence[Problem], operators: str, mistakes: float, seed: int) -> list[Example]:
    """Return one demonstration a problem, some of them wrong.

    The wrong ones leave out a number. The policy learns what is right and is not yet sure of it, so its samples differ
    in reward, which is what reinforcement learning has to start from.

    Args:
        operators: what the mistakes combine the numbers by.
        mistakes: share of demonstrations that leave out a number, 0 to 1.
        seed: seed of which ones and of the expressions.

    Raises:
        ValueError: if `mistakes` is outside 0 to 1.
    """
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes={mistakes!r} is not a share; give a number from 0 to 1")
    rng = random.Random(f"mistakes-{seed}")
    responses = [
        draw_unfinished_attempt(problem, operators, rng) if rng.random() < mistakes else problem.solution
        for problem in problems
    ]
    return [
        Example(build_prompt(problem.numbers, problem.target), build_response(response))
        for problem, response in zip(problems, responses, strict=True)
    ]


def main(
    cache: Annotated[Path, typer.Argument(help="Folder that finished policies are kept in.")],
    examples: Annotated[int, typer.Option(help="Number of solved problems to learn from.")] = 5000,
    mistakes: Annotated[float, typer.Option(help="Share of mistakes in the last steps of the fit, 0 to 1.")] = 0.5,
    steps: Annotated[int, typer.Option(help="Optimizer steps; more of them leave less to reinforcement learning.")] = (
        DEFAULT_FIT.steps
    ),
    batch_size: Annotated[int, typer.Option(help="Examples in each step.")] = DEFAULT_FIT.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = DEFAULT_FIT.learning_rate,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the examples and their order.")] = 0,
    num_threads: Annotated[int, typer.Option(help="Threads of the fit, at most as many as there are free cores.")] = 2,
    min_numbers: Annotated[int, typer.Option(help="Fewest numbers in a problem.")] = DEFAULT.min_numbers,
    max_numbers: Annotated[int, typer.Option(help="Most numbers in a problem.")] = DEFAULT.max_numbers,
    min_value: Annotated[int, typer.Option(help="Smallest number.")] = DEFAULT.min_value,
    max_value: Annotated[int, typer.Option(help="Largest number.")] = DEFAULT.max_value,
    min_target: Annotated[int, typer.Option(help="Smallest target.")] = DEFAULT.min_target,
    max_target: Annotated[int, typer.Option(help="Largest target.")] = DEFAULT.max_target,
    operators: Annotated[str, typer.Option(help="Operators that solutions are built from.")] = DEFAULT.operators,
) -> None:
    """Fit a policy of about a million parameters to solved problems and print its folder on standard output.

    A second call with the same arguments returns the finished folder. The held-out reward goes to standard error.
    """
    try:
        task = CountdownConfig(min_numbers, max_numbers, min_value, max_value, min_target, max_target, operators)
        fit = WarmStartConfig(steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
        solved = generate_problems(task, examples, seed, "train")
        held_out = generate_problems(task, 256, seed, "test")
        started = time.perf_counter()
        folder = fit_policy(solved, operators, mistakes, fit, cache, num_threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - started
    reward = mean_scores(folder, build_rows(held_out, "test"), seed, compute_score)["score"]
    typer.echo(f"warm start: {seconds:.0f} s, held-out reward {reward:.3f} over {len(held_out)} problems", err=True)
    typer.echo(folder)


if __name__ == "__main__":
    typer.run(main)
