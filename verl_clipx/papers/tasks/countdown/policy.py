"""Command line: `python -m verl_clipx.papers.tasks.countdown.policy CACHE` prepares the tiny policy for Countdown."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.papers.tasks.countdown.config import CountdownConfig
from verl_clipx.papers.tasks.countdown.dataset import build_rows
from verl_clipx.papers.tasks.countdown.generator import Problem, draw_unfinished_attempt, generate_problems
from verl_clipx.papers.tasks.countdown.prompt import build_prompt, build_response
from verl_clipx.papers.tasks.countdown.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.sampling import mean_scores
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, WarmStartConfig, skill_and_habit, warm_start

DEFAULT = CountdownConfig()
HABIT_STEPS = 60


def fit_policy(
    problems: Sequence[Problem], operators: str, mistakes: float, config: WarmStartConfig, cache: Path, num_threads: int
) -> Path:
    """Fit the tiny policy to demonstrations, of which some leave out a number in the end; see `skill_and_habit`.

    Args:
        operators: operators in the wrong demonstrations.

    Raises:
        ValueError: there are no problems, or `mistakes` is not a share.
    """

    def examples(share: float) -> list[Example]:
        return build_examples(problems, operators, share, config.seed)

    return warm_start(skill_and_habit(examples, mistakes, config, HABIT_STEPS), cache, num_threads)


def build_examples(problems: Sequence[Problem], operators: str, mistakes: float, seed: int) -> list[Example]:
    """Return one demonstration per problem, some of them wrong.

    Args:
        operators: operators in the wrong demonstrations.
        mistakes: share of demonstrations that leave out a number, 0 to 1.
        seed: decides which demonstrations are wrong, and their expressions.
    """
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
        WarmStartConfig.steps
    ),
    seed: Annotated[int, typer.Option(help="Seed of the weights, the examples and their order.")] = 0,
    num_threads: Annotated[int, typer.Option(help="Threads of the fit, at most as many as there are free cores.")] = 2,
    min_numbers: Annotated[int, typer.Option(help="Fewest numbers in a problem.")] = DEFAULT.min_numbers,
    max_numbers: Annotated[int, typer.Option(help="Most numbers in a problem.")] = DEFAULT.max_numbers,
) -> None:
    """Fit a policy of about a million parameters to solved problems and print its folder on standard output.

    A second call with the same arguments returns the finished folder. The held-out reward goes to standard error.
    """
    try:
        task = CountdownConfig(min_numbers, max_numbers)
        fit = WarmStartConfig(steps=steps, seed=seed)
        solved = generate_problems(task, examples, seed, "train")
        held_out = generate_problems(task, 256, seed, "test")
        started = time.perf_counter()
        folder = fit_policy(solved, task.operators, mistakes, fit, cache, num_threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - started
    reward = mean_scores(folder, build_rows(held_out, "test"), seed, compute_score)["score"]
    typer.echo(f"warm start: {seconds:.0f} s, held-out reward {reward:.3f} over {len(held_out)} problems", err=True)
    typer.echo(folder)


if __name__ == "__main__":
    typer.run(main)
