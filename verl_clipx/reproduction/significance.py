"""Whether a table's methods differ from its baseline, over seeds and questions, corrected for their number."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_clipx.common.statistics.comparison import SEEDS, SEEDS_AND_QUESTIONS, Comparison, compare, compare_means
from verl_clipx.common.statistics.multiple import holm
from verl_clipx.reproduction.measures import Value
from verl_clipx.reproduction.page import Cell, Page, printed
from verl_clipx.reproduction.tables_definition import Row, Table

CellKey = tuple[str, str]
"""Row's and column's name."""

LEVEL = 0.05


def compare_rows(table: Table, by_seed: Mapping[CellKey, Mapping[int, Value]]) -> list[dict[str, Any]]:
    """Compare each trained row with its baseline in each column that both have.

    Args:
        table: the table; a figure has no comparisons.
        by_seed: each cell's numbers by training seed, in the table's unit.

    Returns:
        JSON values: row, baseline, column, and the fields of `Comparison`, the baseline first.
    """
    found = []
    for row in table.rows:
        baseline = table.baseline_of(row)
        for column in table.columns:
            ours, base = by_seed.get((row.name, column.name), {}), by_seed.get((baseline, column.name), {})
            # A model that is only evaluated has no training seed.
            if table.is_figure or not (ours and base) or -1 in ours or -1 in base:
                continue
            one = _compare(list(base.values()), list(ours.values()))
            found.append({"row": row.name, "baseline": baseline, "column": column.name, **one.as_dict()})
    return found


def _compare(base: list[Value], ours: list[Value]) -> Comparison:
    sides = [_stacked(side) for side in (base, ours)]
    if None in sides or list(sides[0]) != list(sides[1]):
        return compare_means([value.mean for value in base], [value.mean for value in ours])
    return compare(*sides, base[0].clusters)


def _stacked(side: list[Value]) -> dict[str, np.ndarray] | None:
    """By benchmark ``[seeds, questions]``; None if a number has no questions."""
    if any(value.by_question is None for value in side):
        return None
    return {name: np.stack([value.by_question[name] for value in side]) for name in side[0].by_question}


def significance_page(table: Table, results: Mapping[str, Any]) -> Page | None:
    """The differences from the baseline, with Holm's p-values; None where nothing was compared.

    The family of a correction is the methods of a column that have one baseline.
    """
    found = {(one["row"], one["column"]): one for one in results.get("comparisons", [])}
    if not found:
        return None
    corrected = _corrected(found)
    columns = [column for column in table.columns if any(key[1] == column.name for key in found)]
    rows = [row for row in table.rows if any(key[0] == row.name for key in found)]

    def text(row: Row, name: str, digits: int) -> Cell:
        one = found.get((row.name, name))
        if one is None:
            return Cell("", "")
        p_value = corrected.get((row.name, name))
        difference = _difference(one, p_value, digits)
        # What a format prints in bold is what is significant here.
        return Cell("", difference) if p_value is not None and p_value < LEVEL else Cell(difference, "")

    digits = {column.name: table.digits if column.digits is None else column.digits for column in columns}
    return Page(
        title=f"{table.title}: differences from the baseline",
        head=[(column.name, ()) for column in columns],
        rows=[(row.name, (), [text(row, column.name, digits[column.name]) for column in columns]) for row in rows],
        below=_below(found),
        footnotes=[],
    )


def _corrected(found: Mapping[CellKey, Mapping[str, Any]]) -> dict[CellKey, float]:
    families: dict[CellKey, list[CellKey]] = {}
    for key, one in found.items():
        if one["p_value"] is not None:
            families.setdefault((one["baseline"], one["column"]), []).append(key)
    corrected: dict[CellKey, float] = {}
    for family in families.values():
        corrected |= dict(zip(family, holm([found[key]["p_value"] for key in family]), strict=True))
    return corrected


def _difference(one: Mapping[str, Any], p_value: float | None, digits: int) -> str:
    difference = printed(one["difference"], digits, sign="+")
    if p_value is None:
        return difference
    low, high = (printed(one[end], digits, sign="+") for end in ("low", "high"))
    p_text = "p < 0.001" if p_value < 0.001 else f"p {p_value:.3f}"
    return f"{difference} [{low}, {high}], {p_text}"


def _below(found: Mapping[CellKey, Mapping[str, Any]]) -> list[str]:
    baselines = dict.fromkeys(one["baseline"] for one in found.values())
    lines = [f"Each row minus {' or '.join(baselines)}."]
    kinds = {one["over"] for one in found.values()}
    of = {
        SEEDS_AND_QUESTIONS: "over training seeds and questions together",
        SEEDS: "over training seeds alone where a number has no questions",
    }
    said = [text for kind, text in of.items() if kind in kinds]
    if said:
        lines.append(f"95 % intervals {', '.join(said)}; not corrected for the number of methods.")
        lines.append("p: Holm's, over the methods of a column with one baseline, not over columns. Bold: p < 0.05.")
    reasons = dict.fromkeys(one["refused"] for one in found.values() if one["p_value"] is None)
    lines += [f"No interval and no p: {reason}." for reason in reasons]
    return lines
