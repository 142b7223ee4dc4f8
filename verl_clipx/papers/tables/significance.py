"""Compares a table's methods with its baseline, over seeds and questions, and corrects for the number of methods."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from verl_clipx.common.statistics.collapse import caution
from verl_clipx.common.statistics.comparison import (
    ALIKE,
    SEEDS,
    SEEDS_AND_QUESTIONS,
    Comparison,
    compare,
    compare_means,
    compare_shares,
    correct_family,
)
from verl_clipx.papers.tables.definition import Column, Row, Table
from verl_clipx.papers.tables.measures import Value
from verl_clipx.papers.tables.page import Cell, Page, printed

WHICH = ("row", "baseline", "column")
"""Keys of a written comparison that are not fields of `Comparison`."""

CellKey = tuple[str, str]
"""Names of the row and the column."""


def compare_rows(table: Table, by_seed: Mapping[CellKey, Mapping[int, Value]]) -> list[dict[str, Any]]:
    """Compare each trained row with its baseline in each column that both have.

    Args:
        by_seed: each cell's numbers by training seed, in the table's unit.

    Returns:
        JSON values: row, baseline, column, and the fields of `Comparison`, in which the baseline comes first.
    """
    compared = []
    for row in table.rows:
        baseline = table.baseline_of(row)
        for column in table.columns:
            ours = by_seed.get((row.name, column.name), {})
            base = by_seed.get((baseline, column.name), {})
            # A model that is only evaluated has no training seed.
            if not (ours and base) or -1 in ours or -1 in base:
                continue
            if table.is_collapse(row, column):
                comparison = _compare_shares(base.values(), ours.values(), table.of_one)
            else:
                comparison = _compare(list(base.values()), list(ours.values()))
            compared.append({"row": row.name, "baseline": baseline, "column": column.name, **asdict(comparison)})
    return compared


def _compare_shares(base: Iterable[Value], ours: Iterable[Value], unit: float) -> Comparison:
    """Compare which trainings collapsed; the means are multiplied by what 1 is in the table's unit."""
    comparison = compare_shares([bool(value.mean) for value in base], [bool(value.mean) for value in ours])
    return replace(
        comparison,
        first=unit * comparison.first,
        second=unit * comparison.second,
        difference=unit * comparison.difference,
    )


def _compare(base: list[Value], ours: list[Value]) -> Comparison:
    """Compare numbers over seeds and questions or, where one has no questions, over seeds alone."""
    stacked_base = _stacked(base)
    stacked_ours = _stacked(ours)
    if stacked_base is None or stacked_ours is None or list(stacked_base) != list(stacked_ours):
        return compare_means([value.mean for value in base], [value.mean for value in ours])
    return compare(stacked_base, stacked_ours)


def _stacked(values: list[Value]) -> dict[str, np.ndarray] | None:
    """Return arrays ``[seeds, questions]`` by benchmark; None if a number has no questions."""
    if any(value.by_question is None for value in values):
        return None
    stacked = {}
    for benchmark in values[0].by_question:
        stacked[benchmark] = np.stack([value.by_question[benchmark] for value in values])
    return stacked


def significance_page(table: Table, results: Mapping[str, Any]) -> Page | None:
    """Return the differences from the baseline with p-values after Holm's correction; None if nothing was compared.

    Each column's methods with the same baseline are corrected together.
    """
    comparisons = _corrected(results.get("comparisons", []))
    if not comparisons:
        return None
    columns = [column for column in table.columns if any(key[1] == column.name for key in comparisons)]
    rows = [row for row in table.rows if any(key[0] == row.name for key in comparisons)]

    def text(row: Row, column: Column) -> Cell:
        comparison = comparisons.get((row.name, column.name))
        if comparison is None:
            return Cell("", "")
        difference = _difference(comparison, table.digits_of(column))
        if comparison.verdict in (None, ALIKE):
            return Cell(difference, "")
        # Measured numbers are printed in bold, which here marks significant differences.
        return Cell("", difference)

    return Page(
        title=f"{table.title}: differences from the baseline",
        head=[(column.name, ()) for column in columns],
        rows=[(row.name, (), [text(row, column) for column in columns]) for row in rows],
        below=_below(comparisons.values(), [entry["baseline"] for entry in results["comparisons"]]),
        footnotes=[],
    )


def _corrected(comparisons: Sequence[Mapping[str, Any]]) -> dict[CellKey, Comparison]:
    """Return the written comparisons by cell, with Holm's p-values over those of a column with the same baseline."""
    families: dict[tuple[str, str], dict[CellKey, Comparison]] = {}
    for entry in comparisons:
        fields = {key: value for key, value in entry.items() if key not in WHICH}
        family = families.setdefault((entry["baseline"], entry["column"]), {})
        family[entry["row"], entry["column"]] = Comparison(**fields)
    corrected = {}
    for family in families.values():
        corrected.update(zip(family, correct_family([*family.values()]), strict=True))
    return corrected


def _difference(comparison: Comparison, digits: int) -> str:
    """Return a difference with its interval and p-value, as far as it has them."""
    difference = printed(comparison.difference, digits, sign="+")
    if comparison.verdict is None:
        return difference
    if comparison.low is None:
        return f"{difference}, {comparison.p_text}"
    low = printed(comparison.low, digits, sign="+")
    high = printed(comparison.high, digits, sign="+")
    return f"{difference} [{low}, {high}], {comparison.p_text}"


def _below(comparisons: Collection[Comparison], baselines: Iterable[str]) -> list[str]:
    """Return the lines below the page: what is subtracted, and how intervals and p-values were made."""
    lines = [f"Each row minus {' or '.join(dict.fromkeys(baselines))}."]
    kinds = {comparison.over for comparison in comparisons if comparison.low is not None}
    meanings = {
        SEEDS_AND_QUESTIONS: "over training seeds and questions together",
        SEEDS: "only over training seeds where a number has no questions",
    }
    intervals = [text for kind, text in meanings.items() if kind in kinds]
    if intervals:
        lines.append(f"95 % intervals {', '.join(intervals)}; not corrected for the number of methods.")
        doubts = dict.fromkeys(
            caution(min(comparison.seeds))
            for comparison in comparisons
            if comparison.verdict and comparison.low is not None
        )
        lines += [f"{doubt}." for doubt in doubts if doubt]
    if any(comparison.verdict and comparison.low is None for comparison in comparisons):
        lines.append("Shares of collapsed trainings: Boschloo's exact test.")
    if any(comparison.verdict for comparison in comparisons):
        lines.append("p: Holm's, over the methods of a column with one baseline, not over columns. Bold: p < 0.05.")
    reasons = dict.fromkeys(comparison.refused for comparison in comparisons if comparison.verdict is None)
    return [*lines, *(f"There is no interval and no p: {reason}." for reason in reasons)]
