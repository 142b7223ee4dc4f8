"""README shows two runs, a response and the commands that come first, and is short; the files beside it say the same
version and licence as pyproject.toml.

Not covered: what README says (test_documented_commands.py, test_links.py) and how its figures look.
"""

import re
from importlib import metadata

import yaml

import verl_clipx

from .documents import PAGES, ROOT, blocks_of, commands_of, links_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_first_screen_has_a_figure_of_each_of_two_runs_and_of_a_response():
    screen, _, _ = README.partition("\n## ")
    figures = [link for link in links_of(screen) if link.startswith("docs/figures/")]
    assert len(figures) == 3 and all((ROOT / figure).is_file() for figure in figures)


def test_it_begins_with_the_demo_and_stays_short():
    commands = [" ".join(one.words) for block in blocks_of(README) for one in commands_of(block)]
    first = ["pip install .[tools]", "clipx demo", "bash scripts/quickstart.sh"]
    assert commands[:3] == first and "bash scripts/test.sh" in commands
    links = [link for link in links_of(README) if not link.startswith("docs/figures/")]
    assert len(links) <= 12 and len(README.split()) <= 1500


def test_no_page_prints_an_address_that_a_reader_has_to_fill_in():
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"(git\+|https?://|git@)\S*[<…]", line)
    ]
    assert not found


def test_the_citation_names_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["authors"] == [{"name": "The verl-clipx developers"}]
    project = metadata.metadata("verl-clipx")
    assert (citation["version"], citation["license"]) == (project["Version"], project["License-Expression"])
    assert project["Name"] in citation["title"]
    assert verl_clipx.__version__ == project["Version"]


def test_the_changelog_names_the_version_that_is_being_made():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"on the way to (\S+?)\.\s", changelog) == [metadata.version("verl-clipx")]
