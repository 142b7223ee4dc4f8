"""Writes evidence.json, and the tables in bypass mode of evidence.md and small_runs.md, from the kept runs.

Run: python benchmarks/evidence_table.py

benchmarks/evidence_default_table.py writes those in verl's default mode.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from evidence import (
    BYPASS,
    COUNTED,
    EXPLORATORY,
    FRESH,
    SECOND_LOOK,
    TUNING,
    Outcomes,
    Protocol,
    best_fixed,
    last_reward,
    mean_reward,
    outcomes_in,
    queue,
    read_kept,
    seeds_of,
    tune,
    tuning_runs,
)
from jinja2 import Environment
from scipy import stats

from verl_clipx.analysis.runs.folder import KEPT
from verl_clipx.common.command_line import reporting_errors
from verl_clipx.common.files import read_text, write_json, write_text
from verl_clipx.common.statistics.collapse import collapse, last_level
from verl_clipx.common.statistics.comparison import LEVEL, holm
from verl_clipx.common.statistics.estimate import estimate

# Of the table in bypass mode.
TABLE, COLUMNS, ROWS, RATES, WIDER_RATES = BYPASS.table, BYPASS.columns, BYPASS.rows, BYPASS.rates, BYPASS.wider_rates

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "evidence.json"
PAGE = DOCS / "results" / "evidence.md"
AMENDMENTS = "\n## Amendments\n"
LOWER_RATES, RULE = DOCS / "results" / "small_runs.md", "### Rule\n"
BEGIN, END = "<!-- from here on: benchmarks/evidence_table.py -->\n", "<!-- up to here -->\n"

# The outcomes that are described.
DESCRIBED = ("mean", "end", "kl", "entropy")

Cells = dict[str, dict[str, list[dict[str, Any]]]]
"""The counted runs, by column and row."""


def hash_of_protocol(protocol: Protocol) -> str:
    """The hash of a protocol's page without its amendments."""
    return hashlib.sha256(read_text(protocol.text).partition(AMENDMENTS)[0].encode()).hexdigest()


def hash_of_rule() -> str:
    """The hash of the section of docs/results/small_runs.md that was committed before its runs."""
    return hashlib.sha256(read_text(LOWER_RATES).partition(RULE)[2].partition("\n### ")[0].encode()).hexdigest()


def no_worse(row: list[float], best: list[float], margin: float) -> dict[str, float]:
    """Welch's test, one-sided at 5 %, that a row's true mean is less than a margin below that of the best fixed width.

    Returns:
        The difference of the means, the lower end of its one-sided 95 % interval, and the p-value.
    """
    unshifted = stats.ttest_ind(row, best, equal_var=False, alternative="greater")
    shifted = stats.ttest_ind(np.add(row, margin), best, equal_var=False, alternative="greater")
    low, difference = unshifted.confidence_interval(1 - LEVEL).low, np.mean(row) - np.mean(best)
    found = {"difference": difference, "low": low, "p_value": shifted.pvalue}
    return {key: round(float(value), 6) for key, value in found.items()}


def tests_of(means: dict[str, dict[str, list[float]]], best: dict[str, str]) -> dict[str, Any]:
    """The protocol's tests.

    Args:
        means: the outcomes of the counted seeds, by column and row; all of them.
        best: the best fixed width of each column.
    """
    settings = [name for name, row in ROWS.items() if row["kind"] != "comparison" and name in means[next(iter(means))]]
    found: dict[str, Any] = {"best_fixed": best, "controls": {}, "no_worse": {}}
    for column, rows in means.items():
        worse = stats.ttest_ind(rows["grpo"], rows["narrow"], equal_var=False, alternative="greater")
        copy = stats.ttest_ind(rows["grpo"], rows["again"], equal_var=False)
        found["controls"][column] = {"narrow": round(float(worse.pvalue), 4), "again": round(float(copy.pvalue), 4)}
    for name in settings:
        found["no_worse"][name] = {
            column: no_worse(rows[name], rows[best[column]], COLUMNS[column]["margin"])
            for column, rows in means.items()
            if name != best[column]
        }
    joint = [max((one["p_value"] for one in found["no_worse"][name].values()), default=0.0) for name in settings]
    found["in_every_column"] = dict(zip(settings, joint, strict=True))
    found["holm"] = dict(zip(settings, holm(joint), strict=True))
    separates = all(column["narrow"] < LEVEL for column in found["controls"].values())
    trusted = sum(column["again"] < LEVEL for column in found["controls"].values()) < 2
    found["claimed"] = [name for name, p in found["in_every_column"].items() if separates and trusted and p < LEVEL]
    return found


def outcomes_of_all(protocol: Protocol) -> Outcomes:
    """The outcomes of a protocol's committed runs.

    Raises:
        ValueError: runs are missing; nothing is tested before all are there.
    """
    outcomes = outcomes_in(protocol, protocol.runs)
    if missing := sum(run not in outcomes for run in queue(protocol, outcomes)):
        raise ValueError(f"{missing} runs of the table are missing: python benchmarks/evidence.py makes them")
    return outcomes


def made_of(protocol: Protocol, outcomes: Outcomes) -> dict[str, int]:
    """How many runs the protocol asked for, by part."""
    wanted = queue(protocol, outcomes)
    return {part: sum(run.part == part for run in wanted) for part in (TUNING, COUNTED)}


Steps = Mapping[int, Mapping[str, float]]
"""A run's metrics, by step."""


def cells_of(protocol: Protocol, measure: Callable[[Steps], dict[str, float]]) -> dict[str, Cells]:
    """The numbers of a protocol's committed runs, by part.

    Args:
        measure: makes them from a run's metrics.
    """
    cells: dict[str, Cells] = {TUNING: {}, COUNTED: {}, SECOND_LOOK: {}, EXPLORATORY: {}}
    for path in sorted(protocol.runs.glob(f"*/*/*{KEPT}")):
        run, record, steps = read_kept(path)
        row = cells[run.part].setdefault(run.column, {}).setdefault(run.row, [])
        numbers = measure(steps) | {"seconds": record["seconds"]}
        row.append({"seed": run.seed, "rate": run.rate, **{key: round(value, 4) for key, value in numbers.items()}})
    return cells


def numbers_of_run(steps: Steps) -> dict[str, float]:
    """A run's outcomes; rewards are in points."""
    fresh = [step[FRESH] for step in steps.values()]
    return {
        "mean": mean_reward(fresh),
        "end": last_reward(fresh),
        "collapsed": collapse(fresh) is not None,
        "entropy": last_level([step["actor/entropy_loss"] for step in steps.values()]),
        "kl": float(np.mean([step["actor/ppo_kl"] for step in steps.values()])),
    }


def means_of(counted: Cells, outcome: str) -> dict[str, dict[str, list[float]]]:
    """An outcome of the counted runs, by column and row."""
    return {
        column: {name: [run[outcome] for run in runs] for name, runs in rows.items()}
        for column, rows in counted.items()
    }


def collect() -> dict[str, Any]:
    """All numbers of the table in bypass mode, from the kept runs; raises as `outcomes_of_all`."""
    outcomes = outcomes_of_all(BYPASS)
    cells = cells_of(BYPASS, numbers_of_run)
    best = {column: best_fixed(BYPASS, column, outcomes) for column in COLUMNS}
    return {
        "protocol": TABLE["protocol"],
        "made": made_of(BYPASS, outcomes),
        "tests": tests_of(means_of(cells[COUNTED], "mean"), best),
        "described": describe(cells[COUNTED]),
        "lower_rates": lower_rates(outcomes, cells),
        **cells,
    }


def lower_rates(outcomes: Outcomes, cells: dict[str, Cells]) -> list[dict[str, Any]]:
    """The rows of docs/results/small_runs.md: each rate's mean on the tuning seeds, the counted runs at the best."""
    found = []
    places = [(column, name) for column in COLUMNS for name in BYPASS.rows_of(column)]
    for column, name in places:
        like = ROWS[name].get("like", name)
        rates, means = tune(BYPASS, column, like, outcomes, WIDER_RATES)
        if rates[0] > RATES[0] or (means and max(means, key=means.get) > RATES[0]):
            continue
        tried = {rate: tuning_runs(BYPASS, column, name, rate) for rate in reversed(rates) if rate <= RATES[0]}
        row: dict[str, Any] = {"column": column, "row": name, "rate": max(means, key=means.get) if means else None}
        row["tuning"] = {
            f"{rate:g}": round(float(np.mean([outcomes[run] for run in runs])), 4)
            for rate, runs in tried.items()
            if like == name and all(run in outcomes for run in runs)
        }
        runs = [
            run
            for run in cells[EXPLORATORY].get(column, {}).get(name, [])
            if run["rate"] == row["rate"] and run["seed"] not in TABLE[TUNING]
        ]
        if runs and len(runs) == len(seeds_of(BYPASS, column, outcomes)):
            row |= describe({column: {name: runs}})[column][name] | {"worst": min(run["mean"] for run in runs)}
        found.append(row)
    return found


def numbers_of_lower_rates(results: dict[str, Any]) -> str:
    """The part of docs/results/small_runs.md that this writes."""
    rows = results["lower_rates"]
    rates = [f"{rate:g}" for rate in reversed(WIDER_RATES) if any(f"{rate:g}" in of["tuning"] for of in rows)]
    every, finished = [of for of in rows if of["tuning"]], [of for of in rows if of["rate"] is not None]
    return fill("lower_rates", BYPASS, results, rates=rates, every=every, finished=finished, highest=RATES[0])


def describe(counted: Cells, outcomes: Sequence[str] = DESCRIBED) -> dict[str, Any]:
    """Mean and 95 % interval over the seeds of each outcome, by column and row, and how many runs collapsed."""
    return {
        column: {
            name: {"seeds": len(runs), "collapsed": sum(run["collapsed"] for run in runs)}
            | {outcome: interval([run[outcome] for run in runs]) for outcome in outcomes}
            for name, runs in rows.items()
        }
        for column, rows in counted.items()
    }


def interval(values: list[float]) -> list[float]:
    """Mean, low and high of a mean's 95 % interval; a single value has none."""
    found = estimate(values)
    return [round(value, 4) for value in (found.mean, found.low, found.high) if value is not None]


def shown(described: dict[str, Any], protocol: Protocol) -> list[str]:
    """The rows that have counted runs, in the table's order."""
    return [name for name in protocol.rows if any(name in described.get(column, {}) for column in protocol.columns)]


def half(values: list[float], form: str) -> str:
    """A mean, and half of its interval behind it if it has one."""
    mean, *ends = values
    return f"{mean:{form}}±{(ends[1] - ends[0]) / 2:{form}}" if ends else f"{mean:{form}}"


def fill(name: str, protocol: Protocol, results: dict[str, Any], **others: Any) -> str:
    """Returns the part of a page that a script writes, by the template that stands beside this file."""
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template.filters |= {
        "half": half,
        "shown": lambda described: shown(described, protocol),
        "title_of": lambda row: protocol.rows[row]["title"],
    }
    text = read_text(Path(__file__).with_name(f"{name}.md.jinja"))
    return template.from_string(text).render(results, columns=protocol.columns, rows=protocol.rows, **others)


def numbers_of(results: dict[str, Any]) -> str:
    """The part of docs/results/evidence.md that this writes."""
    lowest = {
        name: min(
            (run["mean"], COLUMNS[column]["short"])
            for column, runs in results[COUNTED].items()
            for run in runs.get(name, [])
        )
        for name in shown(results["described"], BYPASS)
    }
    return fill("evidence", BYPASS, results, lowest=lowest, look=TABLE[SECOND_LOOK])


def replace_part(page: Path, begin: str, end: str, text: str) -> None:
    """Writes the part of a page between two of its lines anew."""
    before, _, rest = read_text(page).partition(begin)
    write_text(page, f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


def main() -> None:
    """Collects, and writes the pages' numbers."""
    with reporting_errors():
        results = collect()
    write_json(RESULTS, results)
    replace_part(PAGE, BEGIN, END, numbers_of(results))
    replace_part(LOWER_RATES, BEGIN, END, numbers_of_lower_rates(results))


if __name__ == "__main__":
    typer.run(main)
