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
    found = []
    for row in table.rows:
        baseline = table.baseline_of(row)
        for column in table.columns:
            ours, base = by_seed.get((row.name, column.name), {}), by_seed.get((baseline, column.name), {})
            # A model that is only evaluated has no training seed.
            if not (ours and base) or -1 in ours or -1 in base:
                continue
            if table.is_collapse(row, column):
                one = compare_shares(*([bool(value.mean) for value in side.values()] for side in (base, ours)))
                scaled = {name: table.of_one * getattr(one, name) for name in ("first", "second", "difference")}
                one = replace(one, **scaled)
            else:
                one = _compare(list(base.values()), list(ours.values()))
            found.append({"row": row.name, "baseline": baseline, "column": column.name, **asdict(one)})
    return found


def _compare(base: list[Value], ours: list[Value]) -> Comparison:
    sides = [_stacked(side) for side in (base, ours)]
    if None in sides or list(sides[0]) != list(sides[1]):
        return compare_means([value.mean for value in base], [value.mean for value in ours])
    return compare(*sides)


def _stacked(side: list[Value]) -> dict[str, np.ndarray] | None:
    """Return arrays ``[seeds, questions]`` by benchmark; None if a number has no questions."""
    if any(value.by_question is None for value in side):
        return None
    return {name: np.stack([value.by_question[name] for value in side]) for name in side[0].by_question}


def significance_page(table: Table, results: Mapping[str, Any]) -> Page | None:
    """Return the differences from the baseline with p-values after Holm's correction; None if nothing was compared.

    Each column's methods with the same baseline are corrected together.
    """
    found = _corrected(results.get("comparisons", []))
    if not found:
        return None
    columns = [column for column in table.columns if any(key[1] == column.name for key in found)]
    rows = [row for row in table.rows if any(key[0] == row.name for key in found)]

    def text(row: Row, column: Column) -> Cell:
        one = found.get((row.name, column.name))
        if one is None:
            return Cell("", "")
        difference = _difference(one, table.digits_of(column))
        # Measured numbers are printed in bold, which here marks significant differences.
        return Cell(difference, "") if one.verdict in (None, ALIKE) else Cell("", difference)

    return Page(
        title=f"{table.title}: differences from the baseline",
        head=[(column.name, ()) for column in columns],
        rows=[(row.name, (), [text(row, column) for column in columns]) for row in rows],
        below=_below(found.values(), (one["baseline"] for one in results["comparisons"])),
        footnotes=[],
    )


def _corrected(comparisons: Sequence[Mapping[str, Any]]) -> dict[CellKey, Comparison]:
    families: dict[tuple[str, str], dict[CellKey, Comparison]] = {}
    for one in comparisons:
        fields = {key: value for key, value in one.items() if key not in WHICH}
        family = families.setdefault((one["baseline"], one["column"]), {})
        family[one["row"], one["column"]] = Comparison(**fields)
    return {
        key: one
        for family in families.values()
        for key, one in zip(family, correct_family([*family.values()]), strict=True)
    }


def _difference(one: Comparison, digits: int) -> str:
    difference = printed(one.difference, digits, sign="+")
    if one.verdict is None:
        return difference
    interval = (
        "" if one.low is None else f" [{', '.join(printed(end, digits, sign='+') for end in (one.low, one.high))}]"
    )
    return f"{difference}{interval}, {one.p_text}"


def _below(found: Collection[Comparison], baselines: Iterable[str]) -> list[str]:
    lines = [f"Each row minus {' or '.join(dict.fromkeys(baselines))}."]
    kinds = {one.over for one in found if one.low is not None}
    of = {
        SEEDS_AND_QUESTIONS: "over training seeds and questions together",
        SEEDS: "only over training seeds where a number has no questions",
    }
    said = [text for kind, text in of.items() if kind in kinds]
    if said:
        lines.append(f"95 % intervals {', '.join(said)}; not corrected for the number of methods.")
        doubts = dict.fromkeys(caution(min(one.seeds)) for one in found if one.verdict and one.low is not None)
        lines += [f"{doubt}." for doubt in doubts if doubt]
    if any(one.verdict and one.low is None for one in found):
        lines.append("Shares of collapsed trainings: Boschloo's exact test.")
    if any(one.verdict for one in found):
        lines.append("p: Holm's, over the methods of a column with one baseline, not over columns. Bold: p < 0.05.")
    reasons = dict.fromkeys(one.refused for one in found if one.verdict is None)
    return [*lines, *(f"There is no interval and no p: {reason}." for reason in reasons)]
