"""Makes the runs of docs/results/protocol.md that are missing, one after the other in this process, without Ray.

Run: python benchmarks/evidence.py [--only tuning/old/acpo-0.0003-seed901 --runs FOLDER]    go on with the same command
     python benchmarks/evidence.py --lower-rates    those of docs/results/lower_rates.md

benchmarks/evidence.yaml has the columns and rows. A run's log is kept when the run ends. benchmarks/evidence_table.py
makes the table.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml
from one_process import only_rank
from one_process.kept import SEED_KEYS, describe, train_and_keep
from scipy import stats

from verl_clipx.analysis.runs.folder import KEPT, RunFolder
from verl_clipx.common.statistics.comparison import LEVEL

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "results" / "runs" / "evidence"
TABLE = yaml.safe_load((ROOT / "benchmarks" / "evidence.yaml").read_text(encoding="utf-8"))
COLUMNS, ROWS, RATES = TABLE["columns"], TABLE["rows"], TABLE["rates"]
TUNING, COUNTED, SECOND_LOOK, EXPLORATORY = "tuning", "counted", "second_look", "exploratory"
# The grid of docs/results/lower_rates.md.
WIDER_RATES = [*TABLE["lower_rates"], *RATES]
FRESH = "fresh_reward"

# The entries of verl's log that are kept besides FRESH.
METRICS = (
    *("critic/score/mean", "actor/entropy_loss", "actor/ppo_kl", "actor/grad_norm", "response_length/mean"),
    *("actor/clipx/clip_fraction_low", "actor/clipx/clip_fraction_high"),
    *("actor/clipx/hold/width", "actor/clipx/hold/reached", "actor/clipx/hold/missed"),
)


class Wanted(NamedTuple):
    """A run: whether it is for tuning, counted, exploratory or of the second look, its column, row, rate and seed."""

    part: str
    column: str
    row: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """What `--only` calls it: its place in the folder of all runs."""
        return f"{self.part}/{self.column}/{self.row}-{self.rate:g}-seed{self.seed}"

    def path(self, runs: Path) -> Path:
        """The file in which it is kept."""
        return runs / f"{self.name}{KEPT}"


Outcomes = Mapping[Wanted, float]
"""The mean reward of fresh samples over all batches, in points, of the runs that were made."""


@cache
def read_kept(path: Path) -> tuple[Wanted, dict[str, Any], dict[int, Mapping[str, float]]]:
    """A kept run, its record and its metrics by step."""
    run = RunFolder(path)
    return Wanted(*(run.record[key] for key in Wanted._fields)), run.record, run.metrics


def outcomes_in(runs: Path) -> dict[Wanted, float]:
    """The outcomes of the runs in a folder."""
    kept = map(read_kept, sorted(runs.glob(f"*/*/*{KEPT}")))
    return {wanted: 100 * float(np.mean([step[FRESH] for step in steps.values()])) for wanted, _, steps in kept}


def rows_of(column: str) -> dict[str, Any]:
    """The rows of a column."""
    return {name: row for name, row in ROWS.items() if column in row.get("columns", COLUMNS)}


def tuning_runs(column: str, row: str, rate: float) -> list[Wanted]:
    """The runs with a learning rate on the tuning seeds."""
    return [Wanted(TUNING if rate in RATES else EXPLORATORY, column, row, rate, seed) for seed in TABLE[TUNING]]


def tune(
    column: str, row: str, outcomes: Outcomes, grid: Sequence[float] = RATES
) -> tuple[list[float], dict[float, float]]:
    """The rates that a row is tuned on, and the mean outcome of each; no means as long as a run is missing.

    They are the middle ones of RATES, and the grid's next one while the best is at an edge.
    """
    first, last = grid.index(RATES[1]), grid.index(RATES[-1])
    while True:
        rates = grid[first:last]
        runs = [tuning_runs(column, row, rate) for rate in rates]
        if not all(run in outcomes for of_rate in runs for run in of_rate):
            return rates, {}
        means = [float(np.mean([outcomes[run] for run in of_rate])) for of_rate in runs]
        best = first + means.index(max(means))
        if best == first > 0:
            first -= 1
        elif best == last - 1 < len(grid) - 1:
            last += 1
        else:
            return rates, dict(zip(rates, means, strict=True))


def best_rate(column: str, row: str, outcomes: Outcomes, grid: Sequence[float] = RATES) -> tuple[float, float]:
    """The best mean outcome of a row on the tuning seeds, and its rate; of a row like another, the other's."""
    _, means = tune(column, ROWS[row].get("like", row), outcomes, grid)
    return max((mean, rate) for rate, mean in means.items())


def best_fixed(column: str, outcomes: Outcomes, grid: Sequence[float] = RATES) -> str:
    """The fixed width with the best outcome on the tuning seeds of a column."""
    fixed = [name for name, row in ROWS.items() if row["kind"] == "fixed"]
    return max(fixed, key=lambda name: best_rate(column, name, outcomes, grid))


def best_held(outcomes: Outcomes) -> list[str]:
    """Of each target the value with the best outcome on the tuning seeds, as a mean over the columns."""
    means = {
        name: np.mean([best_rate(column, name, outcomes)[0] for column in COLUMNS])
        for name, row in ROWS.items()
        if row["kind"] == "held"
    }
    # The best one of a target comes last.
    return list({ROWS[name]["target"]: name for name in sorted(means, key=means.get)}.values())


def power(seeds: int, deviation: float, margin: float) -> float:
    """The chance that the protocol's test shows that a row equal to the best fixed width is no worse by a margin."""
    freedom = 2 * seeds - 2
    return float(stats.nct.sf(stats.t.isf(LEVEL, freedom), freedom, margin / (deviation * np.sqrt(2 / seeds))))


def deviation_of(column: str, outcomes: Outcomes) -> float:
    """The standard deviation over seeds in a column, pooled over its rows' tuning runs at their best rates."""
    best = [(name, best_rate(column, name, outcomes)[1]) for name, row in rows_of(column).items() if "like" not in row]
    runs = [[outcomes[Wanted(TUNING, column, *one, seed)] for seed in TABLE[TUNING]] for one in best]
    return float(np.sqrt(np.var(runs, axis=1, ddof=1).mean()))


def seeds_of(column: str, outcomes: Outcomes) -> list[int]:
    """The counted seeds of a column: as few as have the protocol's power, within its limits."""
    fewest, most = TABLE[COUNTED]
    deviation, margin = deviation_of(column, outcomes), COLUMNS[column]["margin"]
    enough = (seeds for seeds in range(fewest, most) if power(seeds, deviation, margin) >= TABLE["power"])
    return list(range(1, next(enough, most) + 1))


def queue(outcomes: Outcomes, grid: Sequence[float] = RATES) -> list[Wanted]:
    """All runs that the outcomes so far determine, in the order in which they are made: all tuning first.

    Args:
        grid: of learning rates; with `WIDER_RATES`, only rows whose best rate is a lower one get further runs, which
            are exploratory.
    """
    places = [(column, name, row) for column in COLUMNS for name, row in rows_of(column).items()]
    tuning = [
        run
        for column, name, row in places
        if "like" not in row
        for rate in tune(column, name, outcomes, grid)[0]
        for run in tuning_runs(column, name, rate)
    ]
    if not all(run in outcomes for run in tuning):
        return tuning
    held = best_held(outcomes)
    return tuning + [
        Wanted(COUNTED if grid is RATES else EXPLORATORY, column, name, rate, seed + row.get("seeds_from", 0))
        for column, name, row in places
        if row["kind"] != "held" or name in held
        if (rate := best_rate(column, name, outcomes, grid)[1]) not in RATES or grid is RATES
        for seed in seeds_of(column, outcomes)
    ]


def second_look() -> list[Wanted]:
    """The runs with another model."""
    look = TABLE[SECOND_LOOK]
    return [Wanted(SECOND_LOOK, "sums", row, look["rate"], seed) for seed in look["seeds"] for row in look["rows"]]


def overrides_of(run: Wanted) -> list[str]:
    """What makes a run's configuration of verl's."""
    column = TABLE[SECOND_LOOK] if run.part == SECOND_LOOK else COLUMNS[run.column]
    settings = [*TABLE["common"], *column["overrides"], *ROWS[run.row]["overrides"]]
    return [*settings, f"actor_rollout_ref.actor.optim.lr={run.rate:g}", *(f"{key}={run.seed}" for key in SEED_KEYS)]


def make_run(run: Wanted, runs: Path) -> None:
    """Train, and keep the log.

    Raises:
        ValueError: the folder is the committed one, and the policy to start from is not the protocol's.
    """
    from hydra import compose, initialize_config_module
    from one_process.rollout import FRESH_REWARD

    def select(data: Mapping[str, float]) -> dict[str, float]:
        fresh = data.get(FRESH_REWARD, data["critic/score/mean"])
        return {FRESH: fresh, **{key: data[key] for key in METRICS if key in data}}

    overrides = overrides_of(run)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    record = {**run._asdict(), "overrides": overrides, **describe(config)}
    policy = TABLE[SECOND_LOOK]["policy"] if run.part == SECOND_LOOK else TABLE["policy"]
    if runs.resolve() == RUNS and record["policy"] != policy:
        raise ValueError(f"policy {record['policy']} is not that of the protocol: give --runs a folder of its own")
    train_and_keep(run.path(runs), config, record, select)


def main(
    runs: Annotated[Path, typer.Option(help="Folder of all runs; in another one the policy may differ.")] = RUNS,
    only: Annotated[str | None, typer.Option(help="Only this run; its rate follows from the committed ones.")] = None,
    another_model: Annotated[bool, typer.Option(help="Make the runs of the second look in the table's place.")] = False,
    lower_rates: Annotated[bool, typer.Option(help="Make those with rates below the protocol's instead.")] = False,
) -> None:
    """Make the runs that are missing."""
    os.environ.setdefault("CLIPX_DATA", str(ROOT / "data" / "evidence"))
    only_rank.become_only_rank()
    grid = WIDER_RATES if lower_rates else RATES
    while missing := [
        run
        for run in (second_look() if another_model else queue(outcomes_in(RUNS if only else runs), grid))
        if not run.path(runs).exists() and only in (None, run.name)
    ]:
        print(f"{time.strftime('%F %T')} {missing[0].name}, {len(missing)} to go", file=sys.stderr, flush=True)
        make_run(missing[0], runs)
    print(f"every run that was asked for is in {runs}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
