"""docs/papers.md has every method, every table and every paper that the code names.

Not covered: what it says of them.
"""

import re

from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.papers.tables.definition import table_names
from verl_clipx.run.groups import groups_of

from .documents import ROOT, inline_code_of

# Of this project's own.
OWN_TABLES = {"cpu_small", "reversal"}
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


def test_every_method_and_every_paper_that_a_method_names_is_there():
    words = {word for span in inline_code_of(PAGE) for word in span.split()}
    assert [method for method in BUILT_IN if not words & {*groups_of(method)}] == []
    numbers = {number for method in BUILT_IN for number in re.findall(r"\d{4}\.\d{5}", METHODS[method].source)}
    assert len(numbers) > 15 and [number for number in numbers if f"arxiv.org/abs/{number}" not in PAGE] == []


def test_every_table_of_a_paper_has_its_command():
    commands = {span.removeprefix("clipx table plan ") for span in inline_code_of(PAGE)}
    assert set(table_names()) - OWN_TABLES - commands == set()
