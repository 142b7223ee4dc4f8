"""Held-out reward before and after the quickstart's run, by method and seed: the table of docs/quickstart.md.

Run: python benchmarks/quickstart_table.py RUNS    (about three minutes a run on two free cores; resumable)

The policy after the warm start and the data are the same for all runs; the seed decides the order of the problems and
the samples. The control is grpo with zero advantages.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy
import typer

from verl_clipx.diagnostics.held_out import HeldOutReward, held_out_rewards
from verl_clipx.diagnostics.run_log import RunFolder

ROOT = Path(__file__).parents[1]
METHODS = ("grpo", "acpo", "bapo", "dgpo", "control")


def prepare(runs: Path) -> dict[str, str]:
    """Makes data and policy, once; returns the environment of every run."""
    data = [sys.executable, "-m", "verl_clipx.tasks.countdown", str(runs / "data")]
    subprocess.run(data, check=True, stdout=subprocess.DEVNULL)
    policy = [sys.executable, "-m", "verl_clipx.tasks.countdown.policy", str(runs / "policies"), "--num-threads", "1"]
    folder = subprocess.run(policy, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {
        **os.environ,
        "MODEL_PATH": folder,
        "TRAIN_FILE": str(runs / "data" / "train.parquet"),
        "TEST_FILE": str(runs / "data" / "test.parquet"),
    }


def train(environment: dict[str, str], folder: Path, method: str, seed: int, steps: int) -> None:
    """Makes one run, unless it is already there."""
    if len(held_out_rewards(RunFolder(folder).validation)) == 2:
        return
    overrides = []
    environment = {**environment, "SEED": str(seed), "TOTAL_STEPS": str(steps), "RUN_FOLDER": str(folder)}
    environment["METHOD"] = method
    if method == "control":
        environment |= {"METHOD": "grpo", "VERL_USE_EXTERNAL_MODULES": "zero_advantages"}
        environment["PYTHONPATH"] = str(ROOT / "benchmarks")
        overrides = ["algorithm.adv_estimator=zero"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.log").open("wb") as log:
        recipe = ROOT / "recipes" / "quickstart" / "run_countdown_tiny_cpu.sh"
        subprocess.run(["bash", recipe, *overrides], env=environment, cwd=ROOT, stdout=log, stderr=log, check=True)


def rows(runs: Path, seeds: int) -> Iterator[str]:
    """The table's lines, for the runs that are there."""
    yield "| method | seed | before | after | change |"
    yield "|---|---|---|---|---|"
    for method in METHODS:
        changes = []
        for seed in range(1, seeds + 1):
            found = held_out_rewards(RunFolder(runs / f"{method}-{seed}").validation)
            if len(found) != 2:
                continue
            before, after = found
            changes.append(after.mean - before.mean)
            yield f"| {method} | {seed} | {before} | {after} | {changes[-1]:+.3f} ({overlap(before, after)}) |"
        if len(changes) > 1:
            mean, spread = numpy.mean(changes), numpy.std(changes, ddof=1)
            yield f"| **{method}** | {len(changes)} seeds | | | **{mean:+.3f}**, standard deviation {spread:.3f} |"


def overlap(before: HeldOutReward, after: HeldOutReward) -> str:
    """Whether two intervals overlap."""
    return "overlap" if before.low <= after.high and after.low <= before.high else "apart"


def main(
    runs: Annotated[Path, typer.Argument(help="Where runs are kept.")],
    seeds: Annotated[int, typer.Option(help="Seeds of each method.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 20,
    at_once: Annotated[int, typer.Option(help="Runs at the same time.")] = 1,
) -> None:
    """Make the runs that are missing and print the table."""
    runs = runs.resolve()
    environment = prepare(runs)
    cases = [(method, seed) for seed in range(1, seeds + 1) for method in METHODS]
    with ThreadPoolExecutor(at_once) as pool:
        futures = [
            pool.submit(train, environment, runs / f"{method}-{seed}", method, seed, steps) for method, seed in cases
        ]
        for done, future in enumerate(futures, start=1):
            future.result()
            print(f"{done} of {len(cases)} runs", file=sys.stderr)
    print("\n".join(rows(runs, seeds)))


if __name__ == "__main__":
    typer.run(main)
