"""Links within README.md and docs lead to files of the repository and to headings that are there.

Not covered: links to other sites.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.claims.documents import PAGES, ROOT, links_of


def anchors_of(page: str) -> set[str]:
    """The anchors that a forge gives to a page's headings."""
    tokens = MarkdownIt().parse(page)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str, folder: Path) -> list[str]:
    """The links of a page that lead nowhere.

    Args:
        page: its text.
        folder: the page's folder.
    """
    broken = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text() if path else page)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert broken_links(path.read_text(), path.parent) == []


def test_broken_links_are_found():
    text = """# A heading, with `code`

[here](#a-heading-with-code) [there](docs/dev/testing.md#on-gpus) [away](https://example.org/x) ![a](docs/figures)
[one](docs/nothing.md) [two](#nothing) | [three](docs/dev/testing.md#nothing)
"""
    assert broken_links(text, ROOT) == ["docs/nothing.md", "#nothing", "docs/dev/testing.md#nothing"]
