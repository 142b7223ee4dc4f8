"""The command `clipx recipe plan`: roughly what a run takes on given machines."""

import os
from dataclasses import fields, replace
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from verl_clipx.common.command_line import fail, failing
from verl_clipx.common.terminal import TerminalConsole

console = TerminalConsole()
GIB = 2**30


def plan(
    name: Annotated[
        str, typer.Argument(help="The preset, as `clipx recipe list` names it, such as acpo/countdown_3b_acpo_near.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as for the run itself.")] = None,
    hardware: Annotated[str, typer.Option(help="The machine: a100x4, a100x8 or h100x8.")] = "a100x8",
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    mean_response: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Mean length of a response, as a share of the longest.")
    ] = None,
) -> None:
    """Estimate the memory of weights, gradients and optimizer, and the GPU-hours of a run. It refuses no run."""
    # Keeps verl from warning of a missing accelerator, which planning does not need. verl reads it when it is imported.
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_clipx.papers.tables.estimate import PEAK, Assumptions, estimate
    from verl_clipx.papers.tables.ground_truths import unusable_ground_truth
    from verl_clipx.papers.tables.presets import compose_preset

    peak = PEAK.get(hardware.partition("x")[0])
    if peak is None:
        fail(f"--hardware={hardware}: its speed is unknown. Use a100x4, a100x8 or h100x8.")
    assumptions = Assumptions()
    if mean_response is not None:
        assumptions = replace(assumptions, mean_response_share=mean_response)
    with failing(HydraException, OmegaConfBaseException):
        config = compose_preset(name, [f"+hardware={hardware}", f"trainer.nnodes={nodes}", *(overrides or [])])
        found = estimate(config, peak, assumptions)
    hours = ", ".join(f"{phase} {share:.2f}" for phase, share in found.hours.items())
    memory = ", ".join(f"{what} {size / GIB:.1f}" for what, size in found.memory.items())
    facts = {
        "model": f"{found.parameters / 1e9:.2f}B parameters",
        "GPUs": f"{found.gpus}, {found.gpus // nodes} on each of {nodes} nodes",
        "GiB on a GPU": f"{memory}; activations, logits and the KV cache come on top",
        "a rollout batch": f"{found.tokens / 1e6:.2f}M tokens, {found.updates} updates, {found.observations} of them "
        "after a forward pass for the statistics",
        "GPU-hours of it": f"{sum(found.hours.values()):.2f}: {hours}",
        "the run": "of unknown length: data.train_files is not here and no preset's own. Add "
        "trainer.total_training_steps."
        if found.steps is None
        else f"{found.steps} steps, {found.steps * found.updates} updates, about {found.gpu_hours:.0f} GPU-hours "
        f"({found.gpu_hours / found.gpus:.1f} hours)",
    }
    console.print(f"[bold]{escape(f'{name} on {nodes} x {hardware}')}[/]")
    console.print(_table("estimate, never held against a GPU", [(what, escape(text)) for what, text in facts.items()]))
    rows = [(one.name, f"{getattr(assumptions, one.name):g}", one.metadata["meaning"]) for one in fields(assumptions)]
    console.print(_table("assumed, not measured", rows))
    fault = unusable_ground_truth(config)
    if fault:
        console.print(f"[red]warning[/] {escape(fault)}. Every response to it would count as wrong.", soft_wrap=True)


def _table(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE, title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
