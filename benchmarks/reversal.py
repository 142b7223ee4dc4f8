"""Writes the results of the table reversal, docs/results/reversal.json and its figure, and prints its tables.

Run: python benchmarks/reversal.py    (after `python benchmarks/table_fill.py reversal --runs docs/results/runs`)
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

from verl_clipx.common.statistics.comparison import ALIKE, compare_means
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.runs.folder import RunFolder

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

DOCS = Path(__file__).parents[1] / "docs"
RUNS, RESULTS = DOCS / "results" / "runs", DOCS / "results" / "reversal.json"
FIGURE = DOCS / "figures" / "reversal.png"

PANELS = {
    "critic/score/mean": "reward of the rollouts",
    "actor/entropy_loss": "entropy (nats a token)",
    "actor/ppo_kl": "KL from the policy that sampled (nats a token)",
}


def clipx(*arguments: str) -> str:
    """Runs this checkout's command and returns what it prints."""
    command = [sys.executable, "-m", "verl_clipx.cli", *arguments]
    return subprocess.run(command, cwd=DOCS.parent, check=True, stdout=subprocess.PIPE, text=True).stdout


def with_runs(table: str) -> str:
    """Leaves out the rows of a table that have no number."""
    return "".join(line for line in table.splitlines(keepends=True) if not re.fullmatch(r"\|[^|]+\|[| ]+\|\n", line))


def curves(results: dict) -> dict[str, dict[str, list[dict[int, dict[str, float]]]]]:
    """By regime and row, the metrics of each seed's steps."""
    row_of = {row.preset: row.name for row in load_table("reversal").rows}
    found: dict = defaultdict(lambda: defaultdict(list))
    for run in results["runs"]:
        method, regime = row_of[run["preset"]].split(", ", 1)
        found[regime][method].append(RunFolder(RUNS / run["folder"]).metrics)
    return found


def draw(found: dict) -> None:
    """Draws the mean over seeds of each row, with the range of the seeds: a line of panels a regime."""
    size = (5 * len(PANELS), 3.2 * len(found))
    figure, axes = pyplot.subplots(len(found), len(PANELS), figsize=size, squeeze=False, layout="constrained")
    colours = dict(
        zip(sorted({m for rows in found.values() for m in rows}), pyplot.get_cmap("tab20").colors, strict=False)
    )
    for line, (regime, rows) in zip(axes, found.items(), strict=True):
        for axis, (metric, heading) in zip(line, PANELS.items(), strict=True):
            for method, seeds in rows.items():
                steps = sorted(set.intersection(*(set(seed) for seed in seeds)))
                values = np.array([[seed[step][metric] for step in steps] for seed in seeds])
                axis.fill_between(steps, values.min(0), values.max(0), color=colours[method], alpha=0.15)
                axis.plot(steps, values.mean(0), color=colours[method], label=f"{method} ({len(seeds)})")
            axis.grid(alpha=0.3)
            axis.set_title(heading, fontsize="medium")
        line[0].set_ylabel(regime)
        line[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axis in axes[-1]:
        axis.set_xlabel("rollout batch")
    figure.savefig(FIGURE, dpi=70)


def told_apart(results: dict) -> str:
    """A/A, as a table: the six seeds of a row make two settings of three seeds each in ten ways."""
    claims: dict[str, list[bool]] = defaultdict(list)
    rows: dict[str, set[str]] = defaultdict(set)
    for cell in results["cells"]:
        if len(cell.get("seeds", ())) < 6 or cell["interval"] != "seeds":
            continue
        values = np.array([cell["by_seed"][str(seed)] for seed in cell["seeds"][:6]])
        rows[cell["column"]].add(cell["row"])
        for others in combinations(range(1, 6), 2):
            first = np.isin(range(6), [0, *others])
            claims[cell["column"]].append(compare_means(values[first], values[~first]).verdict not in (None, ALIKE))
    lines = ["### Two settings of three seeds each, both of one row", ""]
    lines += ["| outcome | rows | pairs | told apart | share |", "|---|---|---|---|---|"]
    lines += [
        f"| {column} | {len(rows[column])} | {len(found)} | {sum(found)} | {100 * np.mean(found):.1f} % |"
        for column, found in claims.items()
    ]
    return "\n".join([*lines, "", ""])


def power(seeds: int, difference: float, deviation: float, experiments: int = 20_000) -> float:
    """The chance that Welch's test at 5 % shows a difference of two rows: the page's table of power.

    Args:
        seeds: number of seeds of each row, at least 2.
        difference: of the rows' true means.
        deviation: standard deviation of the seeds within a row.
        experiments: number of drawn experiments; 20,000 give the chance to about 0.003.
    """
    generator = np.random.default_rng(0)
    first, second = generator.normal(0, deviation, (2, experiments, seeds))
    return float(np.mean(stats.ttest_ind(first + difference, second, axis=1, equal_var=False).pvalue < 0.05))


def main() -> None:
    """Collects, draws, and prints the tables."""
    clipx("table", "collect", "reversal", "--runs", str(RUNS), "--out", str(RESULTS))
    table = clipx("table", "render", "reversal", "--results", str(RESULTS))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    draw(curves(results))
    print(f"{told_apart(results)}{with_runs(table)}")


if __name__ == "__main__":
    main()
