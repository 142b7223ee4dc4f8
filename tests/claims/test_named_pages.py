"""The pages that messages name, as docs/faq.md#curves. Covers: each is written so, exists with its section, and is in
the wheel and the sdist, so that whoever installed them can open it. Not covered: names that are put together from
parts, comments and docstrings.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt

from tests.claims.documents import ROOT
from verl_clipx.common.files import read_json

# A page with the folders before it and the section after it; not a link in Markdown, `[page.md](page.md)`.
NAMED_PAGE = re.compile(r"(?<!\]\()(?<![\w/])([\w/]+\.md)(?!\])(?:#([\w-]+))?")
PAGE_IN_WHEEL = re.compile(r'^"(docs/[\w/]+\.md)" = "verl_clipx/(.+)"$', re.MULTILINE)
PAGES = {path.name for path in (ROOT / "docs").rglob("*.md")}
PAGE_IN_SDIST = re.compile(r'^    "/(docs/[\w/]+\.md)",$', re.MULTILINE)


def texts_of(source: str) -> Iterator[str]:
    """The strings of a module, those in f-strings too, without docstrings."""
    nodes = [*ast.walk(ast.parse(source))]
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def messages() -> Iterator[str]:
    """The strings of the package, and where a file of results says that its costs were measured."""
    for module in sorted((ROOT / "verl_clipx").rglob("*.py")):
        yield from texts_of(module.read_text("utf-8"))
    for results in sorted((ROOT / "docs" / "results").glob("?pu/*.json")):
        yield read_json(results).get("costs", {}).get("source", "")


def named_in(text: str) -> set[tuple[str, str]]:
    """The pages of docs that a text names, with their sections, which may be empty."""
    return {(page, section) for page, section in NAMED_PAGE.findall(text) if page.rpartition("/")[2] in PAGES}


def pages_of_messages() -> set[str]:
    """The pages that some message names, without their sections."""
    return {page for text in messages() for page, _ in named_in(text)}


def sections_of(page: str) -> set[str]:
    """The anchors of a page's headings."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text("utf-8"))
    headings = [text.content for token, text in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_a_name_is_found_in_each_form():
    text = "see docs/faq.md#curves, swap.md and [a page](metrics.md) of docs/dev/launching.md, not of cpu_small.md"
    assert named_in(text) == {("docs/faq.md", "curves"), ("swap.md", ""), ("docs/dev/launching.md", "")}
    assert [*texts_of('"""docs/a.md"""\nx = f"docs/b.md{1}"')] == ["docs/b.md"]


def test_whoever_has_the_wheel_can_open_each_page_that_a_message_names():
    pages = pages_of_messages()
    assert len(pages) > 5
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    # tomllib is not in Python 3.10.
    assert dict(PAGE_IN_WHEEL.findall(project)) == {page: page for page in pages}
    assert {*PAGE_IN_SDIST.findall(project)} == pages
    for text in messages():
        for page, section in named_in(text):
            assert not section or section in sections_of(page), text
