"""The error of a sample's bounds in real updates: what clipx.precision predicts of it and what it turns out to be.

Run: CLIPX_DATA=DATA python benchmarks/real_sampled_bounds.py    (some minutes)

DATA is the folder of the data and policy that `clipx table fill reversal` makes. ACPO trains that policy with verl's
trainer and worker in this process, on samples one version old, with two updates of 128 sequences a rollout batch.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.one_process.only_rank import become_only_rank

LOGGED = {
    "sequences passed": "sampled_fraction",
    "predicted error": "bounds_error/predicted",
    "real error": "bounds_error/real",
}


def overrides_of(precision: float, steps: int, seed: int) -> list[str]:
    """Of the preset of the table."""
    return [
        *("+hardware=cpu", "trainer.logger=[file]", "trainer.resume_mode=disable"),
        *(f"trainer.total_training_steps={steps}", f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
        *("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", "clipx_rollout.versions_old=1"),
        f"clipx.precision={precision}",
    ]


def main(
    precision: Annotated[list[float] | None, typer.Option(help="0.1 and 0.3 by default.")] = None,
    steps: Annotated[int, typer.Option(help="Rollout batches of a run.")] = 8,
    seed: Annotated[int, typer.Option(help="Of samples and data.")] = 7,
) -> None:
    """Print a row a precision and rollout batch; the real errors of a row are those that its updates logged."""
    become_only_rank()
    # Only now: verl reads from the environment that it is the only rank.
    from verl_clipx.diagnostics.run_log import read_run_log
    from verl_clipx.one_process.trainer import train
    from verl_clipx.reproduction.presets import compose_preset

    os.environ.setdefault("RAY_ADDRESS", "127.0.0.1:6379")
    print(f"| precision | rollout batch | {' | '.join(LOGGED)} |\n|---|---|---|---|---|")
    for wanted in precision or [0.1, 0.3]:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "metrics.jsonl"
            train(compose_preset("reversal/acpo_4", overrides_of(wanted, steps, seed)), log)
            for step, row in read_run_log(log).iterrows():
                values = [row.get(f"actor/clipx/{name}") for name in LOGGED.values()]
                cells = ["" if value is None or value != value else f"{value:.1%}" for value in values]
                print(f"| {wanted:g} | {step} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
