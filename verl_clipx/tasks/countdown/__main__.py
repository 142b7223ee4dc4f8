"""Command line: `python -m verl_clipx.tasks.countdown FOLDER` writes train.parquet and test.parquet."""

from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.tasks.countdown import options
from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.dataset import write_dataset

DEFAULT = CountdownConfig()


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write train.parquet and test.parquet.")],
    train_size: Annotated[int, typer.Option(help="Number of training problems.")] = 4096,
    test_size: Annotated[int, typer.Option(help="Number of held-out problems.")] = 256,
    seed: Annotated[int, typer.Option(help="Same seed, same problems.")] = 0,
    min_numbers: options.MinNumbers = DEFAULT.min_numbers,
    max_numbers: options.MaxNumbers = DEFAULT.max_numbers,
    min_value: options.MinValue = DEFAULT.min_value,
    max_value: options.MaxValue = DEFAULT.max_value,
    min_target: options.MinTarget = DEFAULT.min_target,
    max_target: options.MaxTarget = DEFAULT.max_target,
    operators: options.Operators = DEFAULT.operators,
) -> None:
    """Write solvable Countdown problems, split without overlap, in verl's Parquet format."""
    try:
        config = CountdownConfig(min_numbers, max_numbers, min_value, max_value, min_target, max_target, operators)
        paths = write_dataset(folder, config, train_size, test_size, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{paths['train']}: {train_size} problems")
    typer.echo(f"{paths['test']}: {test_size} problems")


if __name__ == "__main__":
    typer.run(main)
