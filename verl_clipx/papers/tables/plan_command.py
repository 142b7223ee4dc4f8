"""The command `clipx recipe plan`: what a run takes on given machines, or why it cannot run there."""

import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from verl_clipx.common.command_line import fail, failing
from verl_clipx.common.terminal import TerminalConsole

if TYPE_CHECKING:
    from verl_clipx.papers.tables.cost.assumptions import Assumptions
    from verl_clipx.papers.tables.cost.estimate import Estimate

console = TerminalConsole()


def plan(
    name: Annotated[
        str, typer.Argument(help="The preset, as `clipx recipe list` names it, such as acpo/countdown_3b_acpo_near.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as for the run itself.")] = None,
    hardware: Annotated[str, typer.Option(help="The machine: a100x4, a100x8 or h100x8.")] = "a100x8",
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    train_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts in the training set, if its files are not here.")
    ] = None,
    mean_response: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Mean length of a response, as a share of the longest.")
    ] = None,
) -> None:
    """Estimate memory, tokens, updates and GPU-hours of a run. Exit code 1 if it cannot fit or does not divide."""
    # Keeps verl from warning of a missing accelerator, which planning does not need. verl reads it when it is imported.
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_clipx.papers.tables.cost.assumptions import GPUS, Assumptions
    from verl_clipx.papers.tables.cost.estimate import estimate
    from verl_clipx.papers.tables.ground_truths import check_ground_truths
    from verl_clipx.papers.tables.presets import check_method, compose_preset

    gpu = GPUS.get(hardware.split("x")[0])
    if gpu is None:
        fail(f"--hardware={hardware}: its speed is unknown. Use a100x4, a100x8 or h100x8.")
    assumptions = Assumptions()
    if mean_response is not None:
        assumptions = replace(assumptions, mean_response_share=mean_response)
    with failing(HydraException, OmegaConfBaseException):
        config = compose_preset(name, [f"+hardware={hardware}", f"trainer.nnodes={nodes}", *(overrides or [])])
        check_method(config)
        check_ground_truths(config)
        result = estimate(config, gpu, assumptions, train_prompts)
    console.print(f"[bold]{escape(f'{name} on {nodes} x {hardware}')}[/]")
    for table in (_division(result), _memory(result), _work(result), _assumptions(result.run.assumptions)):
        console.print(table)


def _division(result: "Estimate") -> Table:
    run, layout, rollout = result.run, result.run.layout, result.rollout
    return _facts(
        "division",
        {
            "model": f"{run.shape.parameters / 1e9:.2f}B parameters",
            "GPUs": f"{layout.gpus} x {run.gpu.name}, nodes: {layout.nodes}",
            "training": f"parameters over {layout.shards}, {layout.data_parallel} data-parallel ranks of "
            f"{layout.sequence_parallel} GPUs",
            "rollout": f"{layout.replicas} servers of {layout.gpus_per_replica} GPUs, {rollout.concurrent} responses "
            f"at a time each; the KV cache holds {rollout.full_length_sequences} of full length",
            "rollout batch": f"{layout.rows} responses, {layout.rows_per_rank} a rank",
            "mini-batch": f"{layout.mini_batch_rows} responses, {layout.mini_batch_rows_per_rank} a rank",
        },
    )


def _memory(result: "Estimate") -> Table:
    from verl_clipx.papers.tables.cost.assumptions import GIB

    table = _table(f"memory of a GPU at each phase's peak, GiB of {result.limit / GIB:.1f}", "phase", "GiB", "of which")
    for phase in result.phases:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in phase.parts.items() if size >= GIB / 20)
        table.add_row(phase.name, f"{phase.total / GIB:.1f}", parts)
    table.add_row("host, a node", f"{result.host_bytes / GIB:.0f}", "offloaded states, or loading the model")
    return table


def _work(result: "Estimate") -> Table:
    work, steps = result.work, result.steps
    rows = {
        "tokens of a step": f"{work.prompt_tokens / 1e6:.2f}M of prompts, "
        f"{work.response_tokens / 1e6:.2f}M of responses",
        "updates of a step": f"{work.updates}, {work.observations} after a forward pass for the statistics",
        "seconds of a step": f"{work.seconds:.0f}: generation {work.generation_seconds:.0f}, log-probabilities "
        f"{work.scoring_seconds:.0f}, statistics {work.observation_seconds:.0f}, update {work.training_seconds:.0f}",
        "GPU-hours of a step": f"{result.gpu_hours_per_step:.2f}",
    }
    if steps is None:
        rows["the run"] = (
            "unknown, because data.train_files is not here. Add --train-prompts or trainer.total_training_steps."
        )
    else:
        rows["the run"] = (
            f"{steps} steps, {steps * work.updates} updates, "
            f"{steps * (work.prompt_tokens + work.response_tokens) / 1e9:.2f}G tokens, "
            f"about {result.gpu_hours:.0f} GPU-hours ({result.gpu_hours / result.run.layout.gpus:.1f} hours)"
        )
    return _facts("work and time (rough)", rows)


def _assumptions(assumptions: "Assumptions") -> Table:
    table = _table("assumed, not measured", "assumption", "value", "meaning")
    for assumption in fields(assumptions):
        table.add_row(assumption.name, f"{getattr(assumptions, assumption.name):g}", assumption.metadata["meaning"])
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(box=SIMPLE, title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading == "GiB" else "left")
    return table


def _facts(title: str, rows: dict[str, str]) -> Table:
    table = Table(box=SIMPLE, title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table
