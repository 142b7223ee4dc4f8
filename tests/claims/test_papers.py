"""docs/methods.md has every method and every paper that a method names, docs/papers.md every table.

Not covered: what it says of them.
"""

import re

from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.papers.tables.definition import table_names

from .documents import ROOT, inline_code_of

METHODS_PAGE, PAPERS_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("methods", "papers"))


def test_every_method_and_every_paper_that_a_method_names_is_there():
    formulas = METHODS_PAGE.read_text(encoding="utf-8").split("\n## Formulas\n")[1]
    assert [method for method in BUILT_IN if not re.search(rf"\b{method}\b", formulas)] == []
    numbers = {number for method in BUILT_IN for number in re.findall(r"\d{4}\.\d{5}", METHODS[method].source)}
    assert len(numbers) > 15 and [number for number in numbers if number not in formulas] == []


def test_every_table_is_there():
    assert {*table_names()} - {*inline_code_of(PAPERS_PAGE.read_text(encoding="utf-8"))} == set()
