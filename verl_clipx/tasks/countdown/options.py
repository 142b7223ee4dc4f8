"""Command-line options for the difficulty, the same wherever problems are generated."""

from typing import Annotated

import typer

MinNumbers = Annotated[int, typer.Option(help="Fewest numbers in a problem.")]
MaxNumbers = Annotated[int, typer.Option(help="Most numbers in a problem.")]
MinValue = Annotated[int, typer.Option(help="Smallest number.")]
MaxValue = Annotated[int, typer.Option(help="Largest number.")]
MinTarget = Annotated[int, typer.Option(help="Smallest target.")]
MaxTarget = Annotated[int, typer.Option(help="Largest target.")]
Operators = Annotated[str, typer.Option(help="Operators that solutions are built from.")]
