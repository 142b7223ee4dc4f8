"""docs/papers.md has every table that the code has; tests/methods/test_what_a_method_needs.py looks for the methods.

Not covered: what it says of them.
"""

from verl_clipx.papers.tables.definition import table_names

from .documents import ROOT, inline_code_of

# Of this project's own.
OWN_TABLES = {"cpu_small", "reversal"}
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


def test_every_table_of_a_paper_has_its_command():
    commands = {span.removeprefix("clipx table plan ") for span in inline_code_of(PAGE)}
    assert set(table_names()) - OWN_TABLES - commands == set()
