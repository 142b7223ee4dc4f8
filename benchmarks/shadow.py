"""Methods in GRPO's shadow against runs of those methods: what was predicted, and after how many steps they part.

Run: python benchmarks/shadow.py RUNS

RUNS is a folder; the policy and the data are those that scripts/quickstart.sh leaves, or MODEL_PATH and TRAIN_FILE. One
seeded run of GRPO with the methods in its shadow, and one of each method with the same seed, by the recipe of the
quickstart, whose variables apply (SEED, TOTAL_STEPS, TRAIN_BATCH_SIZE, …). The first rollout batch of all runs is the
same; from the second update on their weights are not. A run that is there is used again. Prints a table, and writes
RUNS/shadow.csv with every step.
"""

import os
import subprocess
from pathlib import Path
from typing import Annotated

import pandas
import typer

from verl_clipx.common.files import write_text
from verl_clipx.diagnostics.run_log import read_run_log

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "run_countdown_tiny_cpu.sh"
CLIPPED = ("clip_fraction_low", "clip_fraction_high")
# A method's bounds, where they adapt; else nothing of its bounds can differ.
BOUNDS = {"acpo": ("epsilon_average", "epsilon_highest"), "bapo": ("c_low_last", "c_high_last")}

# Prediction and run have parted where the clipped share differs by more than this part of the run's, and more than
# this share of the tokens.
RELATIVE, ABSOLUTE = 0.2, 0.002


def trained(folder: Path, method: str, *overrides: str) -> pandas.DataFrame:
    """The log of a run of the recipe, which is made if it is not there."""
    log = folder / "metrics.jsonl"
    if not log.exists():
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"METHOD": method, "RUN_FOLDER": str(folder.absolute())}
        switched_off = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1")
        with (folder / "run.log").open("wb") as output:
            subprocess.run(
                ["bash", RECIPE, *switched_off, *overrides],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
    return read_run_log(log)


def side_by_side(shadowed: pandas.DataFrame, own: pandas.DataFrame, method: str) -> pandas.DataFrame:
    """A row a step and number: what GRPO's shadow predicted, and what the method's own run did."""
    rows = []
    for name in (*CLIPPED, *BOUNDS.get(method, ())):
        predicted, real = shadowed[f"actor/clipx/shadow/{method}/{name}"], own[f"actor/clipx/{name}"]
        for step in sorted({*predicted.dropna().index} & {*real.dropna().index}):
            rows.append((method, name, int(step), float(predicted[step]), float(real[step])))
    return pandas.DataFrame(rows, columns=["method", "number", "step", "predicted", "real"])


def parted(rows: pandas.DataFrame) -> int | None:
    """The first step at which the clipped share was predicted wrongly; None: not in these steps."""
    clipped = rows[rows.number.isin(CLIPPED)].groupby("step")[["predicted", "real"]].sum()
    apart = (clipped.predicted - clipped.real).abs()
    wrong = clipped[(apart > ABSOLUTE) & (apart > RELATIVE * clipped.real)]
    return None if wrong.empty else int(wrong.index[0])


def markdown(rows: pandas.DataFrame, steps: list[int]) -> str:
    """The table: a row a method and number, predicted / real at some steps."""
    lines = [f"| method | number | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (2 + len(steps)) + "|"]
    for (method, number), found in rows.groupby(["method", "number"], sort=False):
        of_step = found.set_index("step")
        cells = [f"{of_step.predicted[step]:.4g} / {of_step.real[step]:.4g}" for step in steps]
        lines.append(f"| {method} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    methods: Annotated[list[str] | None, typer.Option("--method", help="Groups; by default acpo, bapo, dgpo.")] = None,
) -> None:
    """Trains what is missing and prints predicted and real numbers side by side."""
    chosen = methods or ["acpo", "bapo", "dgpo"]
    shadowed = trained(runs / "grpo", "grpo", f"+clipx/shadow=[{','.join(chosen)}]")
    table = pandas.concat(
        [side_by_side(shadowed, trained(runs / method, method), method) for method in chosen], ignore_index=True
    )
    write_text(runs / "shadow.csv", table.to_csv(index=False))
    steps = sorted(table.step.unique())
    few = steps if len(steps) <= 4 else [steps[0], steps[1], steps[len(steps) // 2], steps[-1]]
    shown = [int(step) for step in few]
    print(markdown(table, shown))
    for method, rows in table.groupby("method", sort=False):
        step = parted(rows)
        print(f"{method}: {'not parted' if step is None else f'parted in step {step}'} of {int(rows.step.max())}")


if __name__ == "__main__":
    typer.run(main)
