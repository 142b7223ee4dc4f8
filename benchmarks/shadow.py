"""Methods in GRPO's shadow against runs of those methods: what was predicted, and after how many steps they part.

Run: CLIPX_DATA=DATA python benchmarks/shadow.py RUNS    (DATA: where `clipx table fill reversal` put the data)

For each seed one run of GRPO on reversal with the methods in its shadow, and one of each method with the same seed, by
verl's trainer and worker in this process, with four updates a rollout batch. The first rollout batch of all runs of a
seed is the same; from the second update on their weights are not. A run that is there is used again. Prints a table,
and writes RUNS/shadow.csv with every step.
"""

import os
from pathlib import Path
from typing import Annotated

import pandas
import typer

from verl_clipx.common.files import write_text
from verl_clipx.common.statistics.estimate import estimate_over_seeds
from verl_clipx.diagnostics.run_log import read_run_log
from verl_clipx.one_process.commands import SEED_KEYS
from verl_clipx.one_process.only_rank import become_only_rank

CLIPPED = ("clip_fraction_low", "clip_fraction_high")
# A method's bounds, where they adapt; else nothing of its bounds can differ.
BOUNDS = {"acpo": ("epsilon_average", "epsilon_highest"), "bapo": ("c_low_last", "c_high_last")}

# Prediction and run have parted where the clipped share differs by more than this part of the run's, and more than
# this share of the tokens.
RELATIVE, ABSOLUTE = 0.2, 0.002

STEPS = 8


def trained(folder: Path, method: str, seed: int, *overrides: str) -> pandas.DataFrame:
    """The log of a method's run with a seed, which is made if it is not there."""
    log = folder / f"{method}-seed{seed}" / "metrics.jsonl"
    if not log.exists() or len(read_run_log(log)) < STEPS:
        from verl_clipx.one_process.trainer import train
        from verl_clipx.reproduction.presets import compose_preset

        # Old log-probabilities are the trainer's own, in one forward pass of all responses.
        decoupled = (
            "algorithm.rollout_correction.bypass_mode=false",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        )
        of_run = (*(f"{key}={seed}" for key in SEED_KEYS), f"trainer.total_training_steps={STEPS}")
        train(
            compose_preset(
                f"reversal/{method}_4",
                [
                    "+hardware=cpu",
                    *of_run,
                    *decoupled,
                    "trainer.logger=[file]",
                    "trainer.resume_mode=disable",
                    *overrides,
                ],
            ),
            log,
        )
    return read_run_log(log)


def side_by_side(shadowed: pandas.DataFrame, own: pandas.DataFrame, method: str, seed: int) -> pandas.DataFrame:
    """A row a step and number: what GRPO's shadow predicted, and what the method's own run did."""
    rows = []
    for name in (*CLIPPED, *BOUNDS.get(method, ())):
        predicted, real = shadowed[f"actor/clipx/shadow/{method}/{name}"], own[f"actor/clipx/{name}"]
        for step in sorted({*predicted.dropna().index} & {*real.dropna().index}):
            rows.append((method, name, seed, int(step), float(predicted[step]), float(real[step])))
    return pandas.DataFrame(rows, columns=["method", "number", "seed", "step", "predicted", "real"])


def parted(rows: pandas.DataFrame) -> int | None:
    """The first step at which the clipped share was predicted wrongly in a seed's runs; None: not in these steps."""
    clipped = rows[rows.number.isin(CLIPPED)].groupby("step")[["predicted", "real"]].sum()
    apart = (clipped.predicted - clipped.real).abs()
    wrong = clipped[(apart > ABSOLUTE) & (apart > RELATIVE * clipped.real)]
    return None if wrong.empty else int(wrong.index[0])


def markdown(rows: pandas.DataFrame, steps: list[int]) -> str:
    """The table: predicted / real at some steps, means over seeds, and the interval of predicted minus real."""
    lines = [f"| method | number | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (2 + len(steps)) + "|"]
    for (method, number), found in rows.groupby(["method", "number"], sort=False):
        cells = []
        for step in steps:
            of_step = found[found.step == step]
            apart = estimate_over_seeds((of_step.predicted - of_step.real).tolist())
            interval = "" if apart.low is None else f", {apart.low:+.2g} to {apart.high:+.2g}".replace("-", "−")
            cells.append(f"{of_step.predicted.mean():.3g} / {of_step.real.mean():.3g}{interval}")
        lines.append(f"| {method} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    methods: Annotated[list[str] | None, typer.Option("--method", help="Groups; by default acpo, bapo, dgpo.")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="By default 51 to 55.")] = None,
) -> None:
    """Trains what is missing and prints predicted and real numbers side by side."""
    os.environ.setdefault("CLIPX_DATA", "data")
    become_only_rank()
    chosen, numbers = methods or ["acpo", "bapo", "dgpo"], seeds or [51, 52, 53, 54, 55]
    parts = []
    for seed in numbers:
        shadowed = trained(runs, "grpo", seed, f"+clipx/shadow=[{','.join(chosen)}]")
        parts += [side_by_side(shadowed, trained(runs, method, seed), method, seed) for method in chosen]
    table = pandas.concat(parts, ignore_index=True)
    write_text(runs / "shadow.csv", table.to_csv(index=False))
    print(markdown(table, [1, 2, STEPS // 2, STEPS]))
    for method, rows in table.groupby("method", sort=False):
        steps = [parted(of_seed) for _, of_seed in rows.groupby("seed")]
        print(f"{method}: parted in step {', '.join('–' if step is None else str(step) for step in steps)} of {STEPS}")


if __name__ == "__main__":
    typer.run(main)
