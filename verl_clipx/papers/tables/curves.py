"""A figure's curves as CSV: every point of each row, panel and seed, from `collect`'s results."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from verl_clipx.common.files import no_formula
from verl_clipx.papers.tables.definition import Table


def curves_as_csv(table: Table, results: Mapping[str, Any] | None) -> str:
    """Return a line for each point: row, panel, seed, step, value, and the moving average.

    Raises:
        ValueError: the table is no figure, or no curve has been collected.
    """
    if not table.is_figure:
        raise ValueError(f"--format csv: table {table.name} has no curves. Use markdown, html or latex")
    if not results or not results["curves"]:
        raise ValueError(
            f"--format csv: no curve of {table.name} has been collected. Run `clipx table collect {table.name}`; "
            f"`clipx table plan {table.name}` prints what is missing"
        )
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("row", "panel", "seed", "step", "value", "smooth"))
    for curve in results["curves"]:
        points = zip(curve["steps"], curve["values"], curve["smooth"], strict=True)
        writer.writerows((*map(no_formula, (curve["row"], curve["column"], curve["seed"])), *point) for point in points)
    return file.getvalue()
