"""Writes a hierarchical table as text in which the heading of a row or column is its whole path of headers."""

from typing import Any

PATH_SEPARATOR = " > "
SEPARATOR_IN_CELLS = "/"  # for a vertical bar in a cell, because bars separate columns and answers


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
    heads = [column_paths.get(column) or _join(cells[row][column] for row in range(header_rows)) for column in columns]
    lines = [table["title"].strip(), "", _line([corner, *heads]), _line(["---"] * (1 + len(heads)))]
    for row in range(header_rows, len(cells)):
        values = [cells[row][column] for column in columns]
        if any(values) or row not in parents:
            lines.append(_line([row_paths.get(row) or _join(cells[row][:header_columns]), *values]))
    return "\n".join(lines)


def _filled_cells(table: dict[str, Any]) -> list[list[str]]:
    width = max((len(row) for row in table["texts"]), default=0)
    if not width:
        raise ValueError("texts is empty")
    cells = [[_cell_text(value) for value in row] + [""] * (width - len(row)) for row in table["texts"]]
    for region in table["merged_regions"]:
        first_row = region["first_row"]
        first_column = region["first_column"]
        for row in range(first_row, min(region["last_row"] + 1, len(cells))):
            for column in range(first_column, min(region["last_column"] + 1, width)):
                cells[row][column] = cells[first_row][first_column]
    return cells


def _cell_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else " ".join(str(value).split())


def _headers(root: dict[str, Any], index: str, cells: list[list[str]]) -> tuple[dict[int, str], set[int]]:
    """Return the path of headers for each row or column, and those whose header has headers below it."""
    # A header that has values and headers below it has a path of its own. If a header and its first child share a line,
    # the child is visited later, so that its path is the heading.
    paths: dict[int, str] = {}
    parents: set[int] = set()
    stack = [(child, []) for child in root["children"]]
    while stack:
        node, above = stack.pop()
        row = node["row_index"]
        column = node["column_index"]
        inside = 0 <= row < len(cells) and 0 <= column < len(cells[0])
        path = [*above, cells[row][column]] if inside else above
        paths[node[index]] = _join(path)
        if node["children"]:
            parents.add(node[index])
        stack += [(child, path) for child in node["children"]]
    return paths, parents


def _join(headers: Any) -> str:
    return PATH_SEPARATOR.join(dict.fromkeys(header for header in headers if header))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", SEPARATOR_IN_CELLS) for cell in cells) + " |"
