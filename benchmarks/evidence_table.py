"""Writes the table of docs/results/evidence.md from the kept runs: evidence.json, the page's numbers and the picture.

Run: python benchmarks/evidence_table.py
"""

import hashlib
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from evidence import (
    COLUMNS,
    COUNTED,
    EXPLORATORY,
    FRESH,
    ROWS,
    RUNS,
    SECOND_LOOK,
    TABLE,
    TUNING,
    best_fixed,
    outcomes_in,
    queue,
    read_kept,
)
from scipy import stats

from verl_clipx.common.files import read_text, write_json, write_text
from verl_clipx.common.statistics.collapse import collapse, last_level
from verl_clipx.common.statistics.comparison import LEVEL, holm
from verl_clipx.common.statistics.estimate import estimate
from verl_clipx.runs.folder import KEPT

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, FIGURE = DOCS / "results" / "evidence.json", DOCS / "figures" / "evidence.png"
PAGE, PROTOCOL = DOCS / "results" / "evidence.md", DOCS / "results" / "protocol.md"
AMENDMENTS = "\n## Amendments\n"
LOWER_RATES, RULE = DOCS / "results" / "lower_rates.md", "## Rule\n"
BEGIN, END = "<!-- from here on: benchmarks/evidence_table.py -->\n", "<!-- up to here -->\n"

# Above the page's table.
CAPTION = (
    "Mean reward of fresh samples over all batches, with its 95 % interval over the seeds; below it the difference from"
    " the\nbest fixed width, with the lower end of its one-sided 95 % interval:"
)
# The outcomes that are described.
DESCRIBED = ("mean", "end", "kl", "entropy")

Cells = dict[str, dict[str, list[dict[str, Any]]]]
"""The counted runs, by column and row."""


def hash_of_protocol() -> str:
    """The hash of the protocol without its amendments."""
    return hashlib.sha256(read_text(PROTOCOL).partition(AMENDMENTS)[0].encode()).hexdigest()


def hash_of_rule() -> str:
    """The hash of the section of docs/results/lower_rates.md that was committed before its runs."""
    return hashlib.sha256(read_text(LOWER_RATES).partition(RULE)[2].partition("\n## ")[0].encode()).hexdigest()


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


def collect() -> dict[str, Any]:
    """All numbers of the table, from the kept runs. Nothing is tested before all seeds are there."""
    outcomes = outcomes_in(RUNS)
    wanted = queue(outcomes)
    cells: dict[str, Cells] = {TUNING: {}, COUNTED: {}, SECOND_LOOK: {}, EXPLORATORY: {}}
    for path in sorted(RUNS.glob(f"*/*/*{KEPT}")):
        run, record, steps = read_kept(path)
        fresh = [step[FRESH] for step in steps.values()]
        numbers = {
            "mean": outcomes[run],
            "end": 100 * last_level(fresh),
            "collapsed": collapse(fresh) is not None,
            "entropy": last_level([step["actor/entropy_loss"] for step in steps.values()]),
            "kl": float(np.mean([step["actor/ppo_kl"] for step in steps.values()])),
            "seconds": record["seconds"],
        }
        of_row = cells[run.part].setdefault(run.column, {}).setdefault(run.row, [])
        of_row.append({"seed": run.seed, "rate": run.rate, **{key: round(value, 4) for key, value in numbers.items()}})
    missing = {part: sum(run.part == part and run not in outcomes for run in wanted) for part in (TUNING, COUNTED)}
    tests = None
    if not any(missing.values()):
        means = {
            column: {name: [run["mean"] for run in runs] for name, runs in rows.items()}
            for column, rows in cells[COUNTED].items()
        }
        tests = tests_of(means, {column: best_fixed(column, outcomes) for column in COLUMNS})
    made = {part: sum(run.part == part and run in outcomes for run in wanted) for part in missing}
    described = describe(cells[COUNTED])
    return {"protocol": TABLE["protocol"], "made": made, "missing": missing, "tests": tests} | {
        "described": described,
        **cells,
    }


def describe(counted: Cells) -> dict[str, Any]:
    """Mean and 95 % interval over the seeds of each outcome, by column and row, and how many runs collapsed."""
    return {
        column: {
            name: {"seeds": len(runs), "collapsed": sum(run["collapsed"] for run in runs)}
            | {outcome: interval([run[outcome] for run in runs]) for outcome in DESCRIBED}
            for name, runs in rows.items()
        }
        for column, rows in counted.items()
    }


def interval(values: list[float]) -> list[float]:
    """Mean, low and high of a mean's 95 % interval; a single value has none."""
    found = estimate(values)
    return [round(value, 4) for value in (found.mean, found.low, found.high) if value is not None]


def rows_of_page(described: dict[str, Any], tests: dict[str, Any] | None) -> list[str]:
    """The page's table: a line for each row, a cell for each column, and the p-values, once there are tests."""
    p_values = {"no worse in every column, p": tests["in_every_column"], "Holm's p": tests["holm"]} if tests else {}
    titles = [*(column["title"] for column in COLUMNS.values()), *p_values]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name, row in ROWS.items():
        compared = tests["no_worse"].get(name, {}) if tests else {}
        cells = [
            cell(described[column][name], compared.get(column)) if name in described.get(column, {}) else ""
            for column in COLUMNS
        ]
        if any(cells):
            cells += [f"{values[name]:.3g}" if name in values else "" for values in p_values.values()]
            lines.append(f"| {' | '.join([row['title'], *cells])} |")
    return lines


def cell(of: dict[str, Any], compared: dict[str, float] | None) -> str:
    """A mean with its interval and, below it, the difference from the best fixed width with its lower end."""
    mean = show("{:.1f}", of["mean"])
    return f"{mean}<br>{compared['difference']:+.1f} [{compared['low']:+.1f}]" if compared else mean


def numbers_of(results: dict[str, Any]) -> str:
    """The part of the page that this writes."""
    made, missing, described = results["made"], results["missing"], results["described"]
    if not any(missing.values()):
        lines = [f"All {made[TUNING]} tuning runs and all {made[COUNTED]} runs that count are made."]
    else:
        at_least = "at least " if missing[TUNING] else ""
        wanted = {part: made[part] + missing[part] for part in made}
        lines = [f"{made[TUNING]} of {at_least}{wanted[TUNING]} tuning runs are made, and of those that count "]
        lines[0] += f"{made[COUNTED]} of {at_least}{wanted[COUNTED]}."
    if described:
        lines += ["", "![reward against width and against KL](../figures/evidence.png)", "", CAPTION, ""]
        lines += rows_of_page(described, results["tests"])
    if tests := results["tests"]:
        claimed = ", ".join(ROWS[name]["title"] for name in tests["claimed"]) or "none"
        lines += ["", f"Claimed: {claimed}. Controls:", ""]
        lines += ["| | best fixed width | p, width 0.02 lower than 0.8 to 1.2 | A/A p |", "|---|---|---|---|"]
        lines += [
            f"| {COLUMNS[column]['title']} | {ROWS[best]['title']} | <= "
            f"{max(tests['controls'][column]['narrow'], 1e-4):.2g} | {tests['controls'][column]['again']:.2g} |"
            for column, best in tests["best_fixed"].items()
        ]
    if looked := results[SECOND_LOOK].get("sums"):
        look = TABLE[SECOND_LOOK]
        seeds = " | ".join(f"seed {seed}" for seed in look["seeds"])
        lines += [
            "",
            f"| {look['title']}: mean; last three batches | {seeds} |",
            "|---" * (1 + len(look["seeds"])) + "|",
        ]
        for name, runs in looked.items():
            cells = [f"{run['mean']:.1f}; {run['end']:.1f}" for run in sorted(runs, key=lambda run: run["seed"])]
            lines += [f"| {ROWS[name]['title']} | {' | '.join(cells)} |"]
    return "\n".join(lines) + "\n"


def show(form: str, values: list[float]) -> str:
    """A mean, with its interval behind it if it has one."""
    mean, *ends = (form.format(value) for value in values)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def draw(counted: Cells) -> None:
    """Draws reward against width, rows without one at the right, and reward against KL: a panel a column."""
    figure, axes = pyplot.subplots(2, len(COLUMNS), figsize=(4.5 * len(COLUMNS), 8), layout="constrained")
    beside = [name for name, row in ROWS.items() if "width" not in row]
    for (column, setting), above, below in zip(COLUMNS.items(), *axes, strict=True):
        above.set(xscale="log", title=setting["title"], xlabel="width (none: at the right)", ylabel="reward")
        below.set_xscale("symlog", linthresh=1e-3)
        below.set(xlabel="KL a batch (nats a token)", ylabel="reward")
        for number, (name, row) in enumerate(ROWS.items()):
            if runs := counted.get(column, {}).get(name):
                means, colour = [run["mean"] for run in runs], pyplot.get_cmap("tab20")(number)
                place, shown = row.get("width") or 8 * 1.2 ** beside.index(name), estimate(means)
                above.plot([place] * len(means), means, ".", color=colour, alpha=0.4)
                above.plot([place] * 3, [shown.low, shown.mean, shown.high], "_-", color=colour)
                below.plot([run["kl"] for run in runs], means, "." if "width" in row else "x", label=row["title"])
                below.lines[-1].set_color(colour)
    handles = axes[1][0].get_legend_handles_labels()
    axes[1][-1].legend(*handles, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(FIGURE, dpi=70)


def main() -> None:
    """Collects, draws, and writes the page's numbers."""
    results = collect()
    write_json(RESULTS, results)
    if results[COUNTED]:
        draw(results[COUNTED])
    before, _, rest = read_text(PAGE).partition(BEGIN)
    write_text(PAGE, f"{before}{BEGIN}{numbers_of(results)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
