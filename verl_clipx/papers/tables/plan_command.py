"""The command `clipx recipe plan`: roughly what a run takes on given machines."""

import os
from dataclasses import fields, replace
from typing import Annotated

import typer

from verl_clipx.common.command_line import fail, failing
from verl_clipx.common.listed import print_list
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
        float, typer.Option(min=0.01, max=1, help="Mean length of a response, as a share of the longest.")
    ] = 0.5,
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
    assumed = replace(Assumptions(), mean_response_share=mean_response)
    with failing(HydraException, OmegaConfBaseException):
        config = compose_preset(name, [f"+hardware={hardware}", f"trainer.nnodes={nodes}", *(overrides or [])])
        found = estimate(config, peak, assumed)
    hours = sum(found.hours.values())
    memory = ", ".join(f"{what} {size / GIB:.1f}" for what, size in found.memory.items())
    phases = ", ".join(f"{phase} {share:.2f}" for phase, share in found.hours.items())
    length = "of unknown length: data.train_files is not here and no preset's own. Add trainer.total_training_steps."
    if found.steps is not None:
        total = found.steps * hours
        length = f"{found.steps} steps, {found.steps * found.updates} updates, about {total:.0f} GPU-hours "
        length += f"({total / found.gpus:.1f} hours)"
    facts = [
        ("model", f"{found.parameters / 1e9:.2f}B parameters"),
        ("GPUs", f"{found.gpus}, {found.gpus // nodes} on each of {nodes} nodes"),
        ("GiB on a GPU", f"{memory}; activations, logits and the KV cache come on top"),
        ("a rollout batch", f"{found.tokens / 1e6:.2f}M tokens, {found.updates} updates"),
        ("statistics", f"{found.observations} of these updates take them in a forward pass of their own"),
        ("GPU-hours of it", f"{hours:.2f}: {phases}"),
        ("the run", length),
    ]
    assumptions = [(one.name, f"{getattr(assumed, one.name):g}, {one.metadata['meaning']}") for one in fields(assumed)]
    print_list(console, f"{name} on {nodes} x {hardware}", ("estimate", "by formulas, not measured"), facts)
    print_list(console, "assumed, not measured", ("assumption", "value"), assumptions)
    fault = unusable_ground_truth(config)
    if fault:
        console.print_line(f"warning: {fault}. Every response to it would count as wrong.")
