"""The site of docs, as `mkdocs build --strict` makes it: navigation, methods' pages, links out of docs; with `-m
matrix` that the build takes nothing from another site. Not covered: how it looks.
"""

import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from tests.claims.documents import ROOT, inline_code_of
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.papers.tables.definition import table_names
from verl_clipx.run.listing import describe_methods

# MkDocs, too, loads it by its path.
site_pages = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "site_pages.py")))

NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])


def test_every_page_is_in_the_navigation_and_that_of_papers_names_every_table():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"methods/{name}.md" for name in BUILT_IN} | {*site_pages.ELSEWHERE.values(), "reference.md"}
    assert set(re.findall(r"[\w/.]+\.md", str(site_pages.with_method_pages(NAVIGATION)))) == pages
    named = inline_code_of((ROOT / "docs" / "papers.md").read_text(encoding="utf-8"))
    assert {*table_names()} - {*named} == set()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_methods_page_says_what_its_class_and_its_groups_say(name):
    (method,) = describe_methods(name)
    page = site_pages.method_page(method)
    assert re.search(r"\bF (?:=|is) ", page) and f"({name}.svg)" in page
    own = [one for one in method["parameters"] if not one["of_every_method"]]
    assert own and all(f"| `{one['name']}` | " in page and one["allowed"].replace("|", "\\|") in page for one in own)
    for parameter in own:
        (_, of_first), *others = parameter["in_groups"].items()
        for group, value in others:
            assert value == of_first or f"| `+clipx={group}` | `{parameter['name']}` | " in page
    if name == "acpo":
        # What the release does differently, and why.
        assert "| `+clipx=acpo_reference` | `epsilon_max` | `null` | `3.0` | [script] highest epsilon |" in page
        assert "| `actor/clipx/epsilon` |" in page


def test_the_figures_weights_by_hand():
    weights = runpy.run_path(str(ROOT / "scripts" / "weight_figure.py"))["weights"]

    def at(method, advantage, ratio):
        ratios, found = weights(method, advantage, 0.1)
        return float(found[(ratios - ratio).abs().argmin()])

    grpo = METHODS["grpo"](clip_high=1.4)
    assert at(grpo, 1.0, 1.3) == pytest.approx(1.3, abs=2e-3) and at(grpo, 1.0, 1.5) == 0
    assert at(grpo, -1.0, 0.7) == 0 and at(grpo, -1.0, 1.5) == pytest.approx(1.5, abs=2e-3)
    # Without statistics ACPO's epsilon is epsilon_base.
    acpo = METHODS["acpo"](epsilon_base=0.5)
    assert at(acpo, 1.0, 1.45) > 0 and at(acpo, 1.0, 1.55) == 0
    for name in BUILT_IN:
        assert weights(METHODS[name](), -1.0, 0.4)[1].isfinite().all(), name


def test_the_site_shows_what_a_page_leaves_to_a_command():
    names = ("methods.md", "metrics.md")
    shown = {name: site_pages.with_printed((ROOT / "docs" / name).read_text()) for name in names}
    assert not any("the site shows" in text for text in shown.values())
    assert "| `acpo`, `acpo_reference` | " in shown["methods.md"]
    keys = ("ratio_mean", "effective_sample_size", "clip_fraction")
    assert all(f"`clipx/{key}`" in shown["metrics.md"] for key in keys)
    with pytest.raises(ValueError, match="nothing"):
        site_pages.with_printed("<!-- the site shows: clipx metrics nothing -->")


@pytest.mark.slow
@pytest.mark.matrix
def test_the_site_loads_nothing_from_another(tmp_path):
    # A link that leads nowhere is what `--strict` stops at.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    kinds = r"script|img|link rel=\"(?:stylesheet|preload|preconnect)\""
    loads = re.compile(rf"<(?:{kinds})[^>]*(?:src|href)=\"(?:https?:)?//")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60 and [path for path in pages if loads.search(path.read_text())] == []
