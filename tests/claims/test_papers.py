"""docs/papers.md has every table that the code has; tests/methods/test_what_a_method_needs.py looks for the methods.

Not covered: what it says of them.
"""

from verl_clipx.papers.tables.definition import table_names

from .documents import ROOT, inline_code_of

METHODS_PAGE, PAPERS_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("methods", "papers"))


def test_every_table_is_there():
    assert {*table_names()} - {*inline_code_of(PAPERS_PAGE.read_text(encoding="utf-8"))} == set()
