"""Writes the results of the table cpu_small: docs/results/cpu_small.json, .md, _steps.csv, docs/figures/cpu_small.png.

Run: python benchmarks/cpu_small.py RUNS    (RUNS is what `clipx table plan cpu_small --run --runs RUNS` filled)
"""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import pandas
import typer
from shared import DOCS, clipx

from verl_clipx.runs.run_log import read_run_log

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

RESULTS, TABLE, STEPS = (DOCS / "results" / f"cpu_small{end}" for end in (".json", ".md", "_steps.csv"))
FIGURE = DOCS / "figures" / "cpu_small.png"

COLUMNS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "clip_fraction_low": "actor/clipx/clip_fraction_low",
    "clip_fraction_high": "actor/clipx/clip_fraction_high",
    "grad_norm": "actor/grad_norm",
    "response_length": "response_length/mean",
}
"""Columns of the CSV and verl's names for them."""

PANELS = {
    "reward": "reward of the rollouts",
    "entropy": "entropy (nats a token)",
    "kl": "KL from the old policy (nats a token)",
    "clip_fraction_low": "tokens below the lower bound, A < 0",
    "clip_fraction_high": "tokens above the upper bound, A > 0",
}

GROUPS = {
    "countdown_{}_near": "Countdown, 2 updates",
    "countdown_{}_off": "Countdown, 16 updates",
    "kk_{}": "K&K, 2 updates",
}
"""Patterns of presets' names, and the table's columns."""

BELOW = """
Runs with the same seed have the same problems in the same order. The differences do not use this.

### The runs' logs

![reward, entropy, KL and clip fractions over rollout batches](../figures/{figure})

[{steps}]({steps}) contains the numbers of every step of every run.
"""
"""What follows the rendered table."""

TEN = ("dapo", "cispo", "gppo", "ce_gppo", "aspo", "dgpo", "acpo", "bapo", "ar", "lopti")
COLOURS = {
    "grpo": "black",
    **dict(zip(TEN, pyplot.get_cmap("tab10").colors, strict=True)),
    "ar_lopti": "navy",
}
"""By method, as presets name it."""


def steps_of(runs: Path, results: dict[str, Any]) -> pandas.DataFrame:
    """The logs of all trainings that count: a row a step."""
    logs = []
    for run in results["runs"]:
        if run["preset"]:
            log = read_run_log(runs / run["folder"] / "metrics.jsonl")[list(COLUMNS.values())]
            log.columns = list(COLUMNS)
            logs.append(log.reset_index().assign(preset=run["preset"].split("/")[1], seed=run["seed"]))
    table = pandas.concat(logs)[["preset", "seed", "step", *COLUMNS]]
    return table.sort_values(["preset", "seed", "step"])


def draw(steps: pandas.DataFrame) -> None:
    """Draws the mean over seeds of each method, with the range of the seeds."""
    figure, axes = pyplot.subplots(len(GROUPS), len(PANELS), figsize=(21, 11), sharex=True, layout="constrained")
    for row, (pattern, title) in enumerate(GROUPS.items()):
        for axis, (column, heading) in zip(axes[row], PANELS.items(), strict=True):
            for method, colour in COLOURS.items():
                found = steps[steps["preset"] == pattern.format(method)]
                if found.empty:
                    continue
                by_step = found.groupby("step")[column]
                axis.fill_between(by_step.min().index, by_step.min(), by_step.max(), color=colour, alpha=0.08)
                axis.plot(by_step.mean(), color=colour, linewidth=1.4, label=method)
            axis.grid(alpha=0.3)
            if row == 0:
                axis.set_title(heading, fontsize="medium")
        axes[row, 0].set_ylabel(title, fontsize="large")
        axes[row, -1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axis in axes[-1]:
        axis.set_xlabel("rollout batch")
    figure.suptitle("cpu_small: mean over seeds, with the range of the seeds")
    figure.savefig(FIGURE, dpi=70)


def main(runs: Annotated[Path, typer.Argument(help="Folder of all runs, as of `clipx table plan --runs`.")]) -> None:
    """Collect and render the table, add the logs' summary and the figure."""
    runs = runs.resolve()
    if not any(runs.glob("cpu/*-seed*/metrics.jsonl")):
        raise typer.BadParameter(
            f"{runs} has no cpu/*-seed*/metrics.jsonl: `clipx table plan cpu_small --run` makes them"
        )
    clipx("table", "collect", "cpu_small", "--runs", str(runs), "--out", str(RESULTS))
    clipx("table", "render", "cpu_small", "--results", str(RESULTS), "--out", str(TABLE))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    steps = steps_of(runs, results)
    steps.to_csv(STEPS, index=False, float_format="%.4g", lineterminator="\n")
    draw(steps)
    below = BELOW.format(figure=FIGURE.name, steps=STEPS.name)
    with TABLE.open("a", encoding="utf-8") as file:
        file.write(below)
    for path in (RESULTS, TABLE, STEPS, FIGURE):
        print(path)


if __name__ == "__main__":
    typer.run(main)
