"""Compares the memory of an update with what `clipx recipe plan` says about the same run."""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from verl_clipx.gpu_check.engine import ACTOR, MODEL, ROLLOUT, Bench, attention, precision, update
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.report import Measured
from verl_clipx.gpu_check.sample import Row, save_model

# Range of the measured peak, divided by the planned one. Above it, a run that is planned to fit would not fit; far
# below it, the plan refuses runs that would fit.
LOWEST, HIGHEST = 0.5, 1.1

# A model so large that its tensors take more memory than the libraries do.
SIZES = {"hidden_size": 1024, "layers": 8, "vocabulary": 32_000}
PROMPT, RESPONSE = 512, 1536
ROWS_PER_RANK = 4


def memory(bench: Bench) -> Measured:
    """Compare the peak of a GPU's tensors in an update with the planner's formula for the same model."""
    with tempfile.TemporaryDirectory() as own:
        folder = [Path(own)]
        torch.distributed.broadcast_object_list(folder, src=0)
        if bench.rank == 0:
            save_model(folder[0], tied=False, **SIZES)
        torch.distributed.barrier()
        config = bench.configuration(*overrides(bench.machine), model=folder[0])
        planned = planned_bytes(config, torch.cuda.get_device_properties(0).total_memory)
        measured = update(config, long_rows(ROWS_PER_RANK * bench.machine.ranks)).peak_bytes
        torch.distributed.barrier()
    return verdict(measured, planned)


def verdict(measured: float, planned: float) -> Measured:
    """Return the verdict on a measured peak, given the planned one; both in bytes."""
    share = measured / planned
    return Measured(
        LOWEST <= share <= HIGHEST,
        f"{measured / 2**30:.2f} GiB of {planned / 2**30:.2f} planned: {share:.2f}, within {LOWEST:g} to {HIGHEST:g}",
        {"measured_bytes": measured, "planned_bytes": planned, "share": share},
    )


def overrides(machine: Machine) -> tuple[str, ...]:
    """Return the overrides of the run that is planned and measured: AdamW, packing, flash attention, bfloat16."""
    mini_batch = ROWS_PER_RANK * machine.ranks
    return (
        "+clipx=grpo",
        f"{MODEL}.use_remove_padding=True",
        attention("flash_attention_2"),
        *precision("bf16"),
        f"{ACTOR}.optim.optimizer=AdamW",
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.optim.override_optimizer_config=null",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"data.train_batch_size={2 * mini_batch}",
        f"{ACTOR}.ppo_mini_batch_size={mini_batch}",
        f"{ROLLOUT}.n=1",
        "algorithm.adv_estimator=grpo",
    )


def planned_bytes(config: Any, gpu_bytes: float) -> float:
    """Return the planned peak of a GPU's tensors in an update, without the process and the rollout server."""
    from verl_clipx.reproduction.cost.assumptions import GPU, Assumptions
    from verl_clipx.reproduction.cost.memory import memory_phases, rollout_of
    from verl_clipx.reproduction.cost.run import Run

    # Memory does not depend on speed.
    run = Run(config, GPU("this one", gpu_bytes, flops=math.inf, bandwidth=math.inf), Assumptions())
    phases = memory_phases(run, rollout_of(run))
    outside = ("process", "rollout server")
    tensors = {
        phase.name: sum(size for part, size in phase.parts.items() if not any(name in part for name in outside))
        for phase in phases
    }
    return max(tensors["actor update"], tensors["optimizer step"])


def long_rows(count: int) -> list[Row]:
    """Return rows with the longest prompt and response."""
    generator = torch.Generator().manual_seed(0)
    return [
        Row(
            torch.randint(SIZES["vocabulary"], (PROMPT + RESPONSE,), generator=generator),
            PROMPT,
            torch.full((RESPONSE,), -10.0),
            torch.ones(RESPONSE, dtype=torch.int64),
            1.0,
        )
        for _ in range(count)
    ]
