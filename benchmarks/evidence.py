"""Makes the runs of a protocol that are missing, one after the other in this process, without Ray.

Run: python benchmarks/evidence.py [--protocol default]    go on with the same command
     python benchmarks/evidence.py --only tuning/old/acpo-0.0003-seed901 --runs FOLDER    one run again
     python benchmarks/evidence.py --lower-rates    those of docs/results/small_runs.md

benchmarks/evidence.yaml has the columns and rows of docs/results/protocol.md, benchmarks/evidence_default.yaml those of
docs/results/protocol_default.md. A run's log is kept when the run ends. benchmarks/evidence_table.py makes the table.
"""

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml
from one_process import only_rank
from one_process.kept import SEED_KEYS, describe, keep_configuration, train_and_keep
from one_process.trees import committed_trees
from scipy import stats

from verl_clipx.analysis.runs.folder import KEPT, RunFolder
from verl_clipx.common.command_line import reporting_errors
from verl_clipx.common.files import hash_of_file
from verl_clipx.common.statistics.collapse import last_level
from verl_clipx.common.statistics.comparison import LEVEL

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TUNING, COUNTED, SECOND_LOOK, EXPLORATORY = "tuning", "counted", "second_look", "exploratory"
FRESH = "fresh_reward"
DECOUPLED = "decoupled"
LEAST_URGENT = 19


@dataclass(frozen=True)
class Protocol:
    """What a protocol fixes of its runs.

    Args:
        text: the page that says why.
        runs: the committed folder of its runs.
        table: benchmarks/evidence*.yaml, as it is read; its comments say what each key is.
    """

    text: Path
    runs: Path
    table: Mapping[str, Any]

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by name, in their order."""
        return self.table["columns"]

    @property
    def rows(self) -> dict[str, Any]:
        """The rows by name, in their order."""
        return self.table["rows"]

    @property
    def rates(self) -> list[float]:
        """The learning rates that rows are tuned on, ascending."""
        return self.table["rates"]

    @property
    def wider_rates(self) -> list[float]:
        """`rates`, and below them those of docs/results/small_runs.md."""
        return [*self.table.get("lower_rates", ()), *self.rates]

    @property
    def is_decoupled(self) -> bool:
        """Whether the ratio is to recomputed old_log_probs."""
        return self.table["mode"] == DECOUPLED

    def rows_of(self, column: str) -> dict[str, Any]:
        """The rows of a column."""
        return {name: row for name, row in self.rows.items() if column in row.get("columns", self.columns)}

    def outcome_of(self, steps: Mapping[int, Mapping[str, float]]) -> float:
        """A run's primary outcome, in points."""
        return OUTCOMES[self.table["outcome"]]([step[FRESH] for step in steps.values()])


def mean_reward(rewards: Sequence[float]) -> float:
    """The mean over all batches, in points."""
    return 100 * float(np.mean(rewards))


def last_reward(rewards: Sequence[float]) -> float:
    """The mean over the last three batches, in points."""
    return 100 * last_level(rewards)


OUTCOMES: dict[str, Callable[[Sequence[float]], float]] = {"mean": mean_reward, "end": last_reward}


def read_protocol(name: str, text: str, runs: str) -> Protocol:
    """Reads a protocol.

    Args:
        name: of its file beside this one.
        text: of its page in docs/results.
        runs: of the folder of its runs in docs/results/runs.
    """
    table = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return Protocol(text=RESULTS / text, runs=RESULTS / "runs" / runs, table=table)


BYPASS = read_protocol("evidence.yaml", "protocol.md", "evidence")
DEFAULT = read_protocol("evidence_default.yaml", "protocol_default.md", "evidence_default")
PROTOCOLS = {"bypass": BYPASS, "default": DEFAULT}


def protocol_named(name: str) -> Protocol:
    """The protocol that a command names.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"--protocol {name}: give one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


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
"""The primary outcome of the runs that were made, in points."""


@cache
def read_kept(path: Path) -> tuple[Wanted, dict[str, Any], dict[int, Mapping[str, float]]]:
    """A kept run, its record and its metrics by step."""
    run = RunFolder(path)
    return Wanted(*(run.record_content[key] for key in Wanted._fields)), run.record_content, run.metrics


def outcomes_in(protocol: Protocol, runs: Path) -> dict[Wanted, float]:
    """The outcomes of a protocol's runs in a folder."""
    kept = map(read_kept, sorted(runs.glob(f"*/*/*{KEPT}")))
    return {wanted: protocol.outcome_of(steps) for wanted, _, steps in kept}


def tuning_runs(protocol: Protocol, column: str, row: str, rate: float) -> list[Wanted]:
    """The runs with a learning rate on the tuning seeds."""
    part = TUNING if rate in protocol.rates else EXPLORATORY
    return [Wanted(part, column, row, rate, seed) for seed in protocol.table[TUNING]]


def tune(
    protocol: Protocol, column: str, row: str, outcomes: Outcomes, grid: Sequence[float]
) -> tuple[list[float], dict[float, float]]:
    """The rates that a row is tuned on, and the mean outcome of each; no means as long as a run is missing.

    They are the protocol's first ones, and the grid's next one while the best is at an edge.
    """
    first_rates = protocol.table["first_rates"]
    first, last = grid.index(first_rates[0]), grid.index(first_rates[-1]) + 1
    while True:
        rates = grid[first:last]
        runs = [tuning_runs(protocol, column, row, rate) for rate in rates]
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


def best_rate(
    protocol: Protocol, column: str, row: str, outcomes: Outcomes, grid: Sequence[float] | None = None
) -> tuple[float, float]:
    """The best mean outcome of a row on the tuning seeds, and its rate; of a row like another, the other's."""
    _, means = tune(protocol, column, protocol.rows[row].get("like", row), outcomes, grid or protocol.rates)
    return max((mean, rate) for rate, mean in means.items())


def best_fixed(protocol: Protocol, column: str, outcomes: Outcomes) -> str:
    """The fixed bounds with the best outcome on the tuning seeds of a column."""
    fixed = [name for name, row in protocol.rows.items() if row["kind"] == "fixed"]
    return max(fixed, key=lambda name: best_rate(protocol, column, name, outcomes))


def best_held(protocol: Protocol, outcomes: Outcomes) -> list[str]:
    """Of each target the value with the best outcome on the tuning seeds, as a mean over the columns."""
    means = {
        name: np.mean([best_rate(protocol, column, name, outcomes)[0] for column in protocol.columns])
        for name, row in protocol.rows.items()
        if row["kind"] == "held"
    }
    # The best one of a target comes last.
    return list({protocol.rows[name]["target"]: name for name in sorted(means, key=means.get)}.values())


def power(seeds: int, deviation: float, margin: float) -> float:
    """The chance that the protocol's test shows that a row equal to the best fixed width is no worse by a margin."""
    freedom = 2 * seeds - 2
    return float(stats.nct.sf(stats.t.isf(LEVEL, freedom), freedom, margin / (deviation * np.sqrt(2 / seeds))))


def deviation_of(protocol: Protocol, column: str, outcomes: Outcomes) -> float:
    """The standard deviation over seeds in a column, pooled over its rows' tuning runs at their best rates."""
    tuned = [name for name, row in protocol.rows_of(column).items() if "like" not in row]
    best = [(name, best_rate(protocol, column, name, outcomes)[1]) for name in tuned]
    runs = [[outcomes[Wanted(TUNING, column, *one, seed)] for seed in protocol.table[TUNING]] for one in best]
    return float(np.sqrt(np.var(runs, axis=1, ddof=1).mean()))


def seeds_of(protocol: Protocol, column: str, outcomes: Outcomes) -> list[int]:
    """The counted seeds of a column: those that the protocol names, or as few as have its power, within its limits."""
    declared = protocol.columns[column]
    if "seeds" in declared:
        return list(range(1, declared["seeds"] + 1))
    fewest, most = protocol.table[COUNTED]
    deviation = deviation_of(protocol, column, outcomes)
    needed = protocol.table["power"]
    enough = (seeds for seeds in range(fewest, most) if power(seeds, deviation, declared["margin"]) >= needed)
    return list(range(1, next(enough, most) + 1))


def tuning_of(protocol: Protocol, outcomes: Outcomes, grid: Sequence[float]) -> list[Wanted]:
    """The tuning runs that the outcomes so far determine."""
    return [
        run
        for column in protocol.columns
        for name, row in protocol.rows_of(column).items()
        if "like" not in row
        for rate in tune(protocol, column, name, outcomes, grid)[0]
        for run in tuning_runs(protocol, column, name, rate)
    ]


def queue(protocol: Protocol, outcomes: Outcomes, grid: Sequence[float] | None = None) -> list[Wanted]:
    """All runs that the outcomes so far determine, in the order in which they are made.

    All tuning comes first; then, column by column, every row with one seed before any has the next.

    Args:
        grid: of learning rates; with the wider ones, only rows whose best rate is a lower one get further runs, which
            are exploratory.

    Raises:
        ValueError: a row's best rate is an end of a grid that must not have it there.
    """
    grid = protocol.rates if grid is None else grid
    tuning = tuning_of(protocol, outcomes, grid)
    if not all(run in outcomes for run in tuning):
        return tuning
    is_own_grid = grid == protocol.rates
    part = COUNTED if is_own_grid else EXPLORATORY
    held = best_held(protocol, outcomes)
    counted = []
    for column in protocol.columns:
        rates = {
            name: best_rate(protocol, column, name, outcomes, grid)[1]
            for name, row in protocol.rows_of(column).items()
            if row["kind"] != "held" or name in held
        }
        if protocol.is_decoupled:
            refuse_ends(column, rates, grid)
        counted += [
            Wanted(part, column, name, rate, seed + protocol.rows[name].get("seeds_from", 0))
            for seed in seeds_of(protocol, column, outcomes)
            for name, rate in rates.items()
            if is_own_grid or rate not in protocol.rates
        ]
    return tuning + counted


def refuse_ends(column: str, rates: Mapping[str, float], grid: Sequence[float]) -> None:
    """Refuses best rates that are an end of the grid.

    Args:
        rates: the best rate of each row of the column.

    Raises:
        ValueError: names the first one.
    """
    for name, rate in rates.items():
        if rate in (grid[0], grid[-1]):
            raise ValueError(
                f"{column}/{name}: the best learning rate, {rate:g}, is an end of the grid. Extend `rates` in "
                "benchmarks/evidence_default.yaml, by a dated amendment of docs/results/protocol_default.md"
            )


def second_look(protocol: Protocol) -> list[Wanted]:
    """The runs with another model: every row with one seed before any has the next."""
    look = protocol.table[SECOND_LOOK]
    return [
        Wanted(SECOND_LOOK, look["column"], row, look["rate"], seed) for seed in look["seeds"] for row in look["rows"]
    ]


def overrides_of(protocol: Protocol, run: Wanted) -> list[str]:
    """What makes a run's configuration of verl's."""
    column = protocol.table[SECOND_LOOK] if run.part == SECOND_LOOK else protocol.columns[run.column]
    settings = [*protocol.table["common"], *column["overrides"], *protocol.rows[run.row]["overrides"]]
    return [*settings, f"actor_rollout_ref.actor.optim.lr={run.rate:g}", *(f"{key}={run.seed}" for key in SEED_KEYS)]


def schedule_of_run(protocol: Protocol, config: Any) -> dict[str, Any]:
    """The schedule of a run, as its record keeps it.

    Raises:
        ValueError: it is not of the protocol's mode.
    """
    from verl_clipx.run.resolve import resolve

    schedule = resolve(config).record.schedule
    if schedule.starts_at_ratio_one != protocol.is_decoupled:
        raise ValueError(
            f"the run's schedule is not that of {protocol.table['mode']} mode: "
            "look at algorithm.rollout_correction.bypass_mode in the overrides"
        )
    return dataclasses.asdict(schedule)


def compose_run(overrides: Sequence[str]) -> Any:
    """Composes verl's configuration."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", list(overrides))


def make_run(
    protocol: Protocol, run: Wanted, runs: Path, trees: Mapping[str, str], further: Sequence[str] = ()
) -> None:
    """Trains, and keeps the log.

    Args:
        runs: the folder of all runs.
        trees: the git tree hashes of what makes the run, for its record.
        further: overrides after the run's own.

    Raises:
        ValueError: the folder is the committed one, and the policy to start from is not the protocol's; or the run is
            not of the protocol's mode.
    """
    from one_process.rollout import FRESH_REWARD

    from verl_clipx.analysis.runs.sameness import significant_values

    kept = tuple(protocol.table["kept"])

    def select(data: Mapping[str, float]) -> dict[str, float]:
        fresh = data.get(FRESH_REWARD, data["critic/score/mean"])
        return {FRESH: fresh, **{key: value for key, value in data.items() if key.startswith(kept)}}

    overrides = [*overrides_of(protocol, run), *further]
    config = compose_run(overrides)
    record = {**run._asdict(), "overrides": overrides, **describe(config)}
    policy = protocol.table[SECOND_LOOK]["policy"] if run.part == SECOND_LOOK else protocol.table["policy"]
    if runs.resolve() == protocol.runs and record["policy"] != policy:
        raise ValueError(f"policy {record['policy']} is not that of the protocol: give --runs a folder of its own")
    record |= {
        "schedule": schedule_of_run(protocol, config),
        "trees": dict(trees),
        "config_hash": keep_configuration(runs, significant_values(config)),
        "data": hash_of_file(Path(config.data.train_files)),
    }
    train_and_keep(run.path(runs), config, record, select, check=lambda: refuse_changes(trees))


def refuse_changes(trees: Mapping[str, str]) -> None:
    """Refuses to go on where the code is no longer the one that the process began with.

    Raises:
        ValueError: a folder was changed, or another commit was checked out.
    """
    if trees and committed_trees() != trees:
        raise ValueError("another commit was checked out meanwhile: start again, the run is made once more")


def missing_runs(
    protocol: Protocol, runs: Path, *, only: str | None, another_model: bool, lower_rates: bool
) -> list[Wanted]:
    """The runs that are asked for and not in the folder, in the order in which they are made."""
    if another_model:
        wanted = second_look(protocol)
    else:
        outcomes = outcomes_in(protocol, protocol.runs if only else runs)
        wanted = queue(protocol, outcomes, protocol.wider_rates if lower_rates else protocol.rates)
    return [run for run in wanted if only in (None, run.name) and not run.path(runs).exists()]


def rehearse(protocol: Protocol, run: Wanted) -> None:
    """Trains one batch of a run, and keeps nothing."""
    with tempfile.TemporaryDirectory() as folder:
        make_run(protocol, run, Path(folder), {}, ["trainer.total_training_steps=1"])
        _, record, steps = read_kept(run.path(Path(folder)))
    print(f"{run.name}: rehearsed in {record['seconds']:.0f} s, {len(steps[1])} metrics; nothing is kept")


def main(
    name: Annotated[str, typer.Option("--protocol", help=f"One of {', '.join(PROTOCOLS)}.")] = "bypass",
    runs: Annotated[Path | None, typer.Option(help="Folder of all runs; the committed one by default.")] = None,
    only: Annotated[str | None, typer.Option(help="Only this run; its rate follows from the committed ones.")] = None,
    another_model: Annotated[bool, typer.Option(help="Make the pretrained model's runs instead.")] = False,
    lower_rates: Annotated[bool, typer.Option(help="Make those with rates below the protocol's instead.")] = False,
    rehearsal: Annotated[bool, typer.Option("--rehearse", help="One batch of the next run; keep nothing.")] = False,
) -> None:
    """Make the runs that are missing."""
    with reporting_errors():
        protocol = protocol_named(name)
        folder = runs or protocol.runs
        os.environ.setdefault("CLIPX_DATA", str(ROOT / "data" / "evidence"))
        # Hours of it must not slow down whoever works on the machine.
        os.nice(LEAST_URGENT)
        only_rank.become_only_rank()
        trees = {} if rehearsal else committed_trees()
    while True:
        with reporting_errors():
            refuse_changes(trees)
            missing = missing_runs(protocol, folder, only=only, another_model=another_model, lower_rates=lower_rates)
        if not missing:
            print(f"every run that was asked for is in {folder}", file=sys.stderr)
            return
        print(f"{time.strftime('%F %T')} {missing[0].name}, {len(missing)} to go", file=sys.stderr, flush=True)
        if rehearsal:
            rehearse(protocol, missing[0])
            return
        make_run(protocol, missing[0], folder, trees)


if __name__ == "__main__":
    typer.run(main)
