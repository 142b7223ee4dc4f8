"""Writes evidence_default.json, and the tables in verl's default mode of docs/results/evidence.md, from the kept runs.

Run: python benchmarks/evidence_default_table.py

docs/results/protocol_default.md says what is tested and what is described.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import typer
from evidence import COUNTED, DEFAULT, SECOND_LOOK, TUNING, best_fixed, second_look
from evidence_table import (
    DESCRIBED,
    DOCS,
    PAGE,
    Steps,
    cells_of,
    describe,
    fill,
    made_of,
    means_of,
    numbers_of_run,
    outcomes_of_all,
    replace_part,
)
from scipy import stats

from verl_clipx.common.command_line import reporting_errors
from verl_clipx.common.files import write_json
from verl_clipx.common.statistics.comparison import LEVEL, holm

RESULTS = DOCS / "results" / "evidence_default.json"
BEGIN = "<!-- from here on: benchmarks/evidence_default_table.py -->\n"
END = "<!-- up to here: benchmarks/evidence_default_table.py -->\n"

# The share of tokens outside the bounds as verl logs it, and the share that is outside where the ratio is 1.
CLIPPED = "actor/pg_clipfrac"
FLOOR = ("actor/clipx/floor/clip_fraction_low", "actor/clipx/floor/clip_fraction_high")
OUTCOMES = (*DESCRIBED, "clipped", "floor")

# The row that a correction is added to.
CORRECTED = "corrected"

Ends = Mapping[str, Mapping[str, list[float]]]
"""The primary outcome of the counted runs in points, by column and row."""


def collect() -> dict[str, Any]:
    """All numbers of the tables in verl's default mode, from the kept runs; raises as `outcomes_of_all`."""
    outcomes = outcomes_of_all(DEFAULT)
    cells = cells_of(DEFAULT, measure_run)
    ends = means_of(cells[COUNTED], DEFAULT.table["outcome"])
    best = {column: best_fixed(DEFAULT, column, outcomes) for column in DEFAULT.columns}
    hypothesis = DEFAULT.table["hypothesis"]
    return {
        "protocol": DEFAULT.table["protocol"],
        "made": made_of(DEFAULT, outcomes),
        "best_fixed": best,
        "hypothesis": judge_hypothesis(ends, **hypothesis),
        "corrections": compare_corrections(ends, narrow=hypothesis["narrow"], wide=hypothesis["wide"]),
        "methods": compare_methods(ends, best),
        "described": describe(cells[COUNTED], OUTCOMES),
        "pretrained": describe(cells[SECOND_LOOK], OUTCOMES),
        **{part: cells[part] for part in (TUNING, COUNTED, SECOND_LOOK)},
    }


def measure_run(steps: Steps) -> dict[str, float]:
    """A run's outcomes; rewards are in points, the shares of tokens are means over all batches in percent."""
    clipped = [step[CLIPPED] for step in steps.values()]
    at_ratio_one = [sum(step[key] for key in FLOOR) for step in steps.values()]
    shares = {"clipped": 100 * float(np.mean(clipped)), "floor": 100 * float(np.mean(at_ratio_one))}
    return numbers_of_run(steps) | shares


def judge_hypothesis(ends: Ends, *, more: float, narrow: str, wide: str) -> dict[str, dict[str, float]]:
    """The protocol's test in each column: one row earns more than another by more than some points.

    Args:
        more: the points.
        narrow: the row that earns less.
        wide: the row that earns more.

    Returns:
        By column what `compare_rows` returns, the one-sided p-value of Welch's test against a true difference of `more`
        or less, and Holm's over the columns.
    """
    results = {}
    for column, rows in ends.items():
        shifted = np.subtract(rows[wide], more)
        test = stats.ttest_ind(shifted, rows[narrow], equal_var=False, alternative="greater")
        p_value = round(float(test.pvalue), 6)
        results[column] = {**compare_rows(rows[wide], rows[narrow]), "p_value": p_value}
    corrected = holm([result["p_value"] for result in results.values()])
    for result, p in zip(results.values(), corrected, strict=True):
        result["holm"] = p
    return results


def compare_rows(row: list[float], reference: list[float]) -> dict[str, float]:
    """The difference of two rows' means, and the ends of its two-sided 95 % interval (Welch)."""
    interval = stats.ttest_ind(row, reference, equal_var=False).confidence_interval(1 - LEVEL)
    numbers = {"difference": np.mean(row) - np.mean(reference), "low": interval.low, "high": interval.high}
    return {key: round(float(value), 6) for key, value in numbers.items()}


def compare_corrections(ends: Ends, *, narrow: str, wide: str) -> dict[str, dict[str, dict[str, float]]]:
    """Narrow bounds with the correction against the same without it, and against wide bounds without it, by column."""
    return {
        column: {
            "to_narrow": compare_rows(rows[CORRECTED], rows[narrow]),
            "to_wide": compare_rows(rows[CORRECTED], rows[wide]),
        }
        for column, rows in ends.items()
        if CORRECTED in rows
    }


def compare_methods(ends: Ends, best: Mapping[str, str]) -> dict[str, dict[str, dict[str, float]]]:
    """Each method other than GRPO against the fixed bounds that were best on the tuning seeds, by column and method."""
    methods = [name for name, row in DEFAULT.rows.items() if row["kind"] == "adaptive"]
    return {
        column: {method: compare_rows(rows[method], rows[best[column]]) for method in methods}
        for column, rows in ends.items()
    }


def numbers_of(results: dict[str, Any]) -> str:
    """The part of docs/results/evidence.md that this writes."""
    missing = len(second_look(DEFAULT)) - sum(len(runs) for runs in results[SECOND_LOOK].get("sums", {}).values())
    return fill("evidence_default", DEFAULT, results, look=DEFAULT.table[SECOND_LOOK], missing=missing)


def main() -> None:
    """Collects, and writes the page's numbers."""
    with reporting_errors():
        results = collect()
    write_json(RESULTS, results)
    replace_part(PAGE, BEGIN, END, numbers_of(results))


if __name__ == "__main__":
    typer.run(main)
