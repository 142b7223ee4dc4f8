"""The budgets of budgets.yaml: lines, words, and the ways of values through the package. Not covered: whether the lines
are good ones.
"""

import runpy

import pytest
from omegaconf import OmegaConf

from .documents import ROOT

BUDGETS = OmegaConf.to_container(OmegaConf.load(ROOT / "tests" / "claims" / "budgets.yaml"))
WALK = runpy.run_path(str(ROOT / "scripts" / "walk.py"))["walk"]
LOG = ROOT / "docs" / "results" / "log.md"


def texts(folder: str, *endings: str, without: str | None = None) -> list[str]:
    """The texts of the files with these endings in a folder, `without` those in another one."""
    apart = ROOT / without if without else None
    paths = (path for ending in endings for path in (ROOT / folder).rglob(f"*{ending}"))
    return [path.read_text() for path in paths if apart is None or apart not in (path, *path.parents)]


SOURCES = {
    "plugin": texts("verl_clipx", ".py", without="verl_clipx/papers"),
    "papers": texts("verl_clipx/papers", ".py"),
    "tables": texts("verl_clipx/papers/tables/definitions", ".yaml"),
    "tests": texts("tests", ".py"),
    "benchmarks": [*texts("benchmarks", ".py", ".sh"), *texts("scripts", ".py", ".sh")],
    "pages": [(ROOT / "README.md").read_text(), *texts("docs", ".md", without="docs/results/log.md")],
    "log": [LOG.read_text()],
}


@pytest.mark.parametrize(("part", "most"), BUDGETS["lines"].items())
def test_no_part_has_more_lines(part, most):
    assert sum(text.count("\n") for text in SOURCES[part]) <= most


@pytest.mark.parametrize(("part", "most"), BUDGETS["words"].items())
def test_no_part_has_more_words(part, most):
    assert sum(len(text.split()) for text in SOURCES[part]) <= most


@pytest.mark.parametrize(("start", "most"), BUDGETS["ways"].items())
def test_no_way_is_longer(start, most):
    stays = WALK(*start.split(":"))
    files, returns = len({*stays}), len(stays) - len({*stays})
    assert (files <= most[0], returns <= most[1]) == (True, True), f"{start}: {files}, {returns}"
