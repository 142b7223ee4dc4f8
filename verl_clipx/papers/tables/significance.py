"""Compares a table's methods with its baseline, over seeds and questions, and corrects for the number of methods."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from verl_clipx.common.statistics.collapse import caution
from verl_clipx.common.statistics.comparison import (
    HIGHER,
    LOWER,
    SEEDS,
    SEEDS_AND_QUESTIONS,
    Comparison,
    compare,
    compare_means,
    compare_shares,
    correct_family,
)
from verl_clipx.papers.tables.definition import Column, Table, TableRow
from verl_clipx.papers.tables.measures import Value
from verl_clipx.papers.tables.page import Cell, Page, printed

CELL_KEYS = ("row", "baseline", "column")
"""The keys of a comparison in the results that name the compared cells. Its other keys are fields of `Comparison`."""

CellKey = tuple[str, str]
"""The names of a cell's row and column."""

NO_SEED = -1
"""Stands in place of a training seed with the number of a model that nothing trains."""


def compare_rows(table: Table, by_seed: Mapping[CellKey, Mapping[int, Value]]) -> list[dict[str, Any]]:
    """Compare each trained row with its baseline in each column in which both have numbers.

    Args:
        by_seed: each cell's numbers by training seed, in the table's unit.

    Returns:
        For each comparison a dictionary of JSON values: the names of `row`, `baseline` and `column`, and the fields of
        `Comparison`, of which `first` is the baseline's number and `second` the row's.
    """
    comparisons = []
    for row in table.rows:
        baseline = table.baseline_of(row)
        for column in table.columns:
            ours = by_seed.get((row.name, column.name), {})
            base = by_seed.get((baseline, column.name), {})
            if not ours or not base:
                continue
            if NO_SEED in ours or NO_SEED in base:
                continue
            if table.is_collapse(row, column):
                comparison = _compare_collapses(base.values(), ours.values(), table.accuracy_factor)
            else:
                comparison = _compare_numbers(list(base.values()), list(ours.values()))
            comparisons.append({"row": row.name, "baseline": baseline, "column": column.name, **asdict(comparison)})
    return comparisons


def _compare_collapses(base: Iterable[Value], ours: Iterable[Value], factor: float) -> Comparison:
    """Compare a row with its baseline by the share of trainings that collapsed.

    Args:
        base, ours: of the baseline and of the row, for each training a number that is positive if it collapsed, and 0
            if it did not. The unit of the number makes no difference.
        factor: the factor that turns shares into the table's unit.

    Returns:
        The comparison, with the shares and their difference in the table's unit.
    """
    base_collapsed = [value.mean > 0 for value in base]
    our_collapsed = [value.mean > 0 for value in ours]
    comparison = compare_shares(base_collapsed, our_collapsed)
    # These are all its numbers that have a unit: `compare_shares` gives no interval and no standard error.
    return replace(
        comparison,
        first=factor * comparison.first,
        second=factor * comparison.second,
        difference=factor * comparison.difference,
    )


def _compare_numbers(base: list[Value], ours: list[Value]) -> Comparison:
    """Compare numbers over seeds and questions.

    They are compared over seeds alone if one of them has no accuracies on questions, or if their benchmarks differ.

    Args:
        base, ours: the numbers of the baseline and of the row, one a training seed.
    """
    base_accuracies = _stack_seeds(base)
    our_accuracies = _stack_seeds(ours)
    if base_accuracies is None or our_accuracies is None or list(base_accuracies) != list(our_accuracies):
        return compare_means([value.mean for value in base], [value.mean for value in ours])
    return compare(base_accuracies, our_accuracies)


def _stack_seeds(values: list[Value]) -> dict[str, np.ndarray] | None:
    """Stack the accuracies on each question that the numbers of several seeds have.

    Args:
        values: a cell's numbers, one a training seed, at least one. All are of the same benchmarks and questions.

    Returns:
        For each benchmark an array ``[seeds, questions]`` float64; None if a number has no accuracies on questions.
    """
    if any(value.accuracies_by_benchmark is None for value in values):
        return None
    stacked = {}
    for benchmark in values[0].accuracies_by_benchmark:
        stacked[benchmark] = np.stack([value.accuracies_by_benchmark[benchmark] for value in values])
    return stacked


def significance_page(table: Table, results: Mapping[str, Any]) -> Page | None:
    """Return a page with the differences from the baseline and their p-values; None if nothing was compared.

    The p-values are corrected by Holm's method; see `_read_corrected`.

    Args:
        results: from `collect`.
    """
    comparisons = _read_corrected(results.get("comparisons", []))
    if not comparisons:
        return None
    compared_rows = {row_name for row_name, _ in comparisons}
    compared_columns = {column_name for _, column_name in comparisons}
    rows = [row for row in table.rows if row.name in compared_rows]
    columns = [column for column in table.columns if column.name in compared_columns]

    def build_cell(row: TableRow, column: Column) -> Cell:
        """Return a cell with the difference, in bold if it is significant; empty if nothing was compared."""
        comparison = comparisons.get((row.name, column.name))
        if comparison is None:
            return Cell(plain="", bold="")
        difference = _format_difference(comparison, table.digits_of(column))
        is_significant = comparison.verdict in (HIGHER, LOWER)
        if is_significant:
            return Cell(plain="", bold=difference)
        return Cell(plain=difference, bold="")

    return Page(
        title=f"{table.title}: differences from the baseline",
        head=[(column.name, ()) for column in columns],
        rows=[(row.name, (), [build_cell(row, column) for column in columns]) for row in rows],
        below=_lines_below(comparisons.values(), [entry["baseline"] for entry in results["comparisons"]]),
        footnotes=[],
    )


def _read_corrected(entries: Sequence[Mapping[str, Any]]) -> dict[CellKey, Comparison]:
    """Return the comparisons of the results by cell, with p-values that are corrected by Holm's method.

    The comparisons of one column with the same baseline form a family, for which the p-values are corrected.

    Args:
        entries: from `compare_rows`.
    """
    families: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        families[entry["baseline"], entry["column"]].append(entry)
    comparisons = {}
    for family in families.values():
        uncorrected = []
        for entry in family:
            fields = {key: value for key, value in entry.items() if key not in CELL_KEYS}
            uncorrected.append(Comparison(**fields))
        for entry, comparison in zip(family, correct_family(uncorrected), strict=True):
            comparisons[entry["row"], entry["column"]] = comparison
    return comparisons


def _format_difference(comparison: Comparison, digits: int) -> str:
    """Return a difference as text, with its interval and its p-value if it has them."""
    difference = printed(comparison.difference, digits, sign="+")
    if comparison.verdict is None:
        return difference
    if _has_test_of_shares(comparison):
        return f"{difference}, {comparison.p_text}"
    low = printed(comparison.low, digits, sign="+")
    high = printed(comparison.high, digits, sign="+")
    return f"{difference} [{low}, {high}], {comparison.p_text}"


def _has_test_of_shares(comparison: Comparison) -> bool:
    """Return whether shares of collapses were compared and tested.

    Only `compare_shares` gives a verdict without an interval: Boschloo's exact test has no interval.
    """
    return comparison.verdict is not None and comparison.low is None


def _lines_below(comparisons: Collection[Comparison], baselines: Iterable[str]) -> list[str]:
    """Return the lines below the page: what is subtracted, and how intervals and p-values were made.

    Args:
        comparisons: the comparisons of all cells, with corrected p-values.
        baselines: the name of the baseline of each comparison.
    """
    lines = [f"Each row minus {' or '.join(dict.fromkeys(baselines))}."]
    with_interval = [comparison for comparison in comparisons if comparison.low is not None]
    meanings = {
        SEEDS_AND_QUESTIONS: "over training seeds and questions together",
        SEEDS: "only over training seeds where a number has no values by question",
    }
    kinds = {comparison.over for comparison in with_interval}
    intervals = [meaning for kind, meaning in meanings.items() if kind in kinds]
    if intervals:
        lines.append(f"95 % intervals {', '.join(intervals)}. They are not corrected for the number of methods.")
        # A caution that holds for several comparisons is printed once.
        cautions: list[str] = []
        for comparison in with_interval:
            # An interval over questions alone says nothing about the methods, so it needs no caution.
            if comparison.verdict is None:
                continue
            caution_text = caution(min(comparison.seeds))
            if caution_text is not None and caution_text not in cautions:
                cautions.append(caution_text)
        lines += [f"{caution_text}." for caution_text in cautions]
    if any(map(_has_test_of_shares, comparisons)):
        lines.append("Shares of collapsed trainings: Boschloo's exact test.")
    if any(comparison.verdict for comparison in comparisons):
        lines.append(
            "p-values are corrected by Holm's method over the methods of a column with one baseline, not over columns. "
            "Bold: p < 0.05."
        )
    reasons = dict.fromkeys(comparison.refused for comparison in comparisons if comparison.verdict is None)
    lines += [f"There is no interval and no p: {reason}." for reason in reasons]
    return lines
