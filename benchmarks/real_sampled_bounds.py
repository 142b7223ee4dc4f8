"""How far the bounds of a sample, and lagged ones, are from the exact ones in real updates: docs/performance.md.

Run: CLIPX_DATA=DATA python benchmarks/real_sampled_bounds.py RUNS    (DATA: of `clipx table fill reversal`)

For each seed and size of a mini-batch ACPO trains the policy of reversal with exact bounds, by verl's trainer and
worker in this process, on samples one version old, with two updates a rollout batch, and traces every token. Then the
worker's own planner decides on each traced update as it would have under each rule, from the statistics of the update's
own tokens, and its bounds and F are compared with the exact ones. A run that is there is used again.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.one_process.commands import SEED_KEYS
from verl_clipx.one_process.only_rank import become_only_rank

# To a prompt, in all runs on reversal.
RESPONSES = 8


def trained(folder: Path, prompts: int, steps: int, seed: int) -> Path:
    """A traced run's folder with two mini-batches of some prompts a rollout batch; made if it is not there."""
    from verl_clipx.diagnostics.run_log import read_run_log
    from verl_clipx.one_process.trainer import train
    from verl_clipx.reproduction.presets import compose_preset

    run = folder / f"{RESPONSES * prompts}-seed{seed}"
    log = run / "metrics.jsonl"
    if not log.exists() or len(read_run_log(log)) < steps:
        overrides = [
            *("+hardware=cpu", "trainer.logger=[file]", "trainer.resume_mode=disable", "clipx_rollout.versions_old=1"),
            *(f"trainer.total_training_steps={steps}", *(f"{key}={seed}" for key in SEED_KEYS)),
            *(f"data.train_batch_size={2 * prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"),
            *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", "+clipx/trace=prompts"),
            *("clipx.trace.fraction=1", "clipx.trace.every=1"),
        ]
        train(compose_preset("reversal/acpo_4", overrides), log)
    return run


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    prompts: Annotated[list[int] | None, typer.Option(help="Of a mini-batch; 8, 64 and 512 by default.")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="By default 71 to 73.")] = None,
    steps: Annotated[int, typer.Option(help="Rollout batches of a run.")] = 8,
) -> None:
    """Train what is missing and print a row for each size, method and rule, over all seeds."""
    os.environ.setdefault("CLIPX_DATA", "data")
    become_only_rank()
    # Only now: verl reads from the environment that it is the only rank.
    import torch
    from planned_bounds import cells, compared

    torch.set_num_threads(1)
    print(
        "| sequences of a mini-batch | method | rule | sequences passed | updates not exact | predicted error | "
        "real error (largest) | within 95 % | tokens with another F (seeds) | clipped |\n|" + "---|" * 10
    )
    for size in prompts or [8, 64, 512]:
        rows: dict[tuple[str, str], list] = {}
        for seed in seeds or [71, 72, 73]:
            for name, rule, values in compared(trained(runs, size, steps, seed), steps):
                rows.setdefault((name, rule), []).append(values)
        for (name, rule), values in rows.items():
            row = [str(RESPONSES * size), name, rule, *cells(values, rule == "lagged")]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
