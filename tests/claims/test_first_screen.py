"""README is short and shows two runs; the files beside it say the same version and licence as pyproject.toml.

Not covered: what README says (test_documented_commands.py, test_links.py) and how its figures look.
"""

import re
from importlib import metadata

import yaml

from .documents import ROOT, links_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_has_less_than_900_words():
    assert len(README.split()) < 900, "a measurement belongs into docs/, and so does what only some readers need"


def test_its_first_screen_has_a_figure_of_each_of_two_runs():
    screen, _, _ = README.partition("\n## ")
    figures = [link for link in links_of(screen) if link.startswith("docs/figures/")]
    assert len(figures) == 2 and all((ROOT / figure).is_file() for figure in figures)


def test_the_citation_names_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["authors"] == [{"name": "The verl-clipx developers"}]
    project = metadata.metadata("verl-clipx")
    assert (citation["version"], citation["license"]) == (project["Version"], project["License-Expression"])
    assert project["Name"] in citation["title"]


def test_the_changelog_names_the_version_that_is_being_made():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"on the way to (\S+?)\.\s", changelog) == [metadata.version("verl-clipx")]
