"""The command `clipx papers`: what reproduces the papers' experiments, in the order of an experiment."""

import typer

from verl_clipx.common.command_line import CommandGroup
from verl_clipx.papers.evaluation.commands import app as eval_commands
from verl_clipx.papers.tables.recipe_commands import app as recipe_commands
from verl_clipx.papers.tables.table_commands import app as table_commands
from verl_clipx.papers.tasks.commands import app as data_commands

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Reproduce experiments of four papers. Build their data, plan trainings, evaluate, and fill tables.",
)
app.add_typer(data_commands, name="data")
app.add_typer(eval_commands, name="eval")
app.add_typer(recipe_commands, name="recipe")
app.add_typer(table_commands, name="table")
