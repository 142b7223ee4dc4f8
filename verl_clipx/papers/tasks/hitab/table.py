"""Writes a hierarchical table as text in which the heading of a row or column is its whole path of headers."""

from collections.abc import Iterable
from typing import Any

PATH_SEPARATOR = " > "
"""Between the headers of a path."""

SEPARATOR_IN_CELLS = "/"
"""Stands for a vertical bar in a cell, because bars separate columns and answers."""


def table_text(table: dict[str, Any]) -> str:
    """Return a table of HiTab's release (folder tables/raw) as its title and a Markdown table.

    A row or column outside the header trees is headed by its cells in the header columns or rows, with merged cells
    filled in. A row that is only the header of others and has no values is left out, because it is in their paths.

    Raises:
        LookupError, TypeError, AttributeError: a key is missing or of the wrong type.
        ValueError: there is no cell.
    """
    cells = _filled_cells(table)
    header_rows = min(table["top_header_rows_num"], len(cells))
    header_columns = min(table["left_header_columns_num"], len(cells[0]))
    column_paths, _ = _headers(table["top_root"], "column_index", cells)
    row_paths, parents = _headers(table["left_root"], "row_index", cells)
    columns = range(header_columns, len(cells[0]))
    corner = _join(cells[row][column] for row in range(header_rows) for column in range(header_columns))
    headings = []
    for column in columns:
        header_cells = [cells[row][column] for row in range(header_rows)]
        headings.append(column_paths.get(column) or _join(header_cells))
    lines = [table["title"].strip(), "", _line([corner, *headings]), _line(["---"] * (1 + len(headings)))]
    for row in range(header_rows, len(cells)):
        values = [cells[row][column] for column in columns]
        if any(values) or row not in parents:
            heading = row_paths.get(row) or _join(cells[row][:header_columns])
            lines.append(_line([heading, *values]))
    return "\n".join(lines)


def _filled_cells(table: dict[str, Any]) -> list[list[str]]:
    """Return the texts of a table's cells by row and column. All rows have the same length.

    Each cell of a merged region has the text of the region's first cell.

    Raises:
        ValueError: there is no cell.
    """
    width = max((len(row) for row in table["texts"]), default=0)
    if not width:
        raise ValueError("texts is empty")
    cells = []
    for row_values in table["texts"]:
        texts = [_cell_text(value) for value in row_values]
        texts += [""] * (width - len(texts))
        cells.append(texts)
    for region in table["merged_regions"]:
        first_row = region["first_row"]
        first_column = region["first_column"]
        for row in range(first_row, min(region["last_row"] + 1, len(cells))):
            for column in range(first_column, min(region["last_column"] + 1, width)):
                cells[row][column] = cells[first_row][first_column]
    return cells


def _cell_text(value: Any) -> str:
    """Return the text of a cell: 5.0 as 5, nothing for None, and one blank for any white space."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return " ".join(str(value).split())


def _headers(root: dict[str, Any], index: str, cells: list[list[str]]) -> tuple[dict[int, str], set[int]]:
    """Read a tree of headers.

    Args:
        root: the tree's root, which is no header itself.
        index: the key of a header with its row or column: "row_index" for the headers of rows, "column_index" for those
            of columns.
        cells: from `_filled_cells`.

    Returns:
        The path of headers of each row or column, and the rows or columns whose header has others below it.
    """
    # A header that has values and headers below it has a path of its own. If a header and its first child share a line,
    # the child is visited later, so that its path is the heading.
    paths: dict[int, str] = {}
    parents: set[int] = set()
    # The headers that are still to be read, each with the path of the header above it.
    open_headers: list[tuple[dict[str, Any], list[str]]] = [(child, []) for child in root["children"]]
    while open_headers:
        header, path_above = open_headers.pop()
        row = header["row_index"]
        column = header["column_index"]
        is_in_table = 0 <= row < len(cells) and 0 <= column < len(cells[0])
        path = [*path_above, cells[row][column]] if is_in_table else path_above
        paths[header[index]] = _join(path)
        if header["children"]:
            parents.add(header[index])
        open_headers += [(child, path) for child in header["children"]]
    return paths, parents


def _join(headers: Iterable[str]) -> str:
    """Return headers as one path. Empty ones and repetitions are left out."""
    return PATH_SEPARATOR.join(dict.fromkeys(header for header in headers if header))


def _line(cells: list[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", SEPARATOR_IN_CELLS) for cell in cells) + " |"
