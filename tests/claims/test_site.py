"""The site of docs, as `mkdocs build --strict` makes it in scripts/test.sh.

Covers: every page of docs is in the navigation; a method's page has its formula, parameters, settings and metrics;
links that leave docs lead to pages; with `-m matrix`, that the build takes nothing from another site, and stops at a
link and at an anchor that are not there. Not covered: how it looks.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.claims.documents import ROOT, inline_code_of
from verl_clipx.methods import BUILT_IN
from verl_clipx.papers.tables.definition import table_names
from verl_clipx.run.listing import describe_methods

# MkDocs, too, loads it by its path.
_SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
site_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site_pages)

NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])


def test_every_page_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"methods/{name}.md" for name in BUILT_IN} | {*site_pages.ELSEWHERE.values(), "reference.md"}
    assert set(re.findall(r"[\w/.]+\.md", str(site_pages.with_method_pages(NAVIGATION)))) == pages


def test_the_page_of_papers_names_every_table():
    named = inline_code_of((ROOT / "docs" / "papers.md").read_text(encoding="utf-8"))
    assert {*table_names()} - {*named} == set()


def differs(parameter: dict, group: str) -> bool:
    first, *_ = parameter["in_groups"].values()
    return parameter["in_groups"][group] != first


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_methods_page_says_what_its_class_and_its_groups_say(name):
    (method,) = describe_methods(name)
    page = site_pages.method_page(method)
    assert re.search(r"\bF (?:=|is) ", page) and f"({name}.svg)" in page
    own = [one for one in method["parameters"] if not one["of_every_method"]]
    assert own and all(f"| `{one['name']}` | " in page and one["allowed"].replace("|", "\\|") in page for one in own)
    others = [(group, one["name"]) for one in own for group in method["groups"][1:] if differs(one, group)]
    assert all(f"| `+clipx={group}` | `{parameter}` | " in page for group, parameter in others)


def test_a_page_names_what_the_release_does_differently_and_why():
    (method,) = describe_methods("acpo")
    page = site_pages.method_page(method)
    assert "| `+clipx=acpo_reference` | `epsilon_max` | `null` | `3.0` | [script] highest epsilon |" in page
    assert "| `actor/clipx/epsilon` |" in page


def test_a_link_out_of_docs_leads_to_a_page():
    assert site_pages.target_of("../verl_clipx/methods/acpo.py", "methods.md") == "verl_clipx/methods/acpo.py"
    assert site_pages.target_of("docs/methods.md", "index.md") == "docs/methods.md"
    assert site_pages.target_of("https://example.org/x", "index.md") is None
    assert site_pages.linked_files("[a](../README.md) [b](../LICENSE) [c](faq.md#x)", "methods.md") == {"LICENSE"}
    assert "Apache" in site_pages.shown("LICENSE")


def test_the_site_shows_what_a_page_leaves_to_a_command():
    names = ("methods.md", "metrics.md")
    shown = {name: site_pages.with_printed((ROOT / "docs" / name).read_text()) for name in names}
    assert not any("the site shows" in text for text in shown.values())
    assert "| `acpo`, `acpo_reference` | " in shown["methods.md"]
    assert all(
        f"`clipx/{key}`" in shown["metrics.md"] for key in ("ratio_mean", "entropy_clip_estimate", "clip_fraction")
    )
    with pytest.raises(ValueError, match="nothing"):
        site_pages.with_printed("<!-- the site shows: clipx metrics nothing -->")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.matrix
def test_the_site_loads_nothing_and_has_no_broken_link(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    loads = re.compile(
        r"<(?:script|img|link rel=\"(?:stylesheet|preload|preconnect)\")[^>]*(?:src|href)=\"(?:https?:)?//"
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60 and not [path for path in pages if loads.search(path.read_text())]

    checkout, large = tmp_path / "checkout", shutil.ignore_patterns(".git", "build", ".venv*", "*_cache")
    # The runs of this checkout are large too; verl_clipx/runs is code.
    of_root = {str(ROOT): {"runs"}}
    shutil.copytree(ROOT, checkout, ignore=lambda folder, names: large(folder, names) | of_root.get(folder, set()))
    with (checkout / "docs/faq.md").open("a") as page:
        page.write("\n[one](nothing.md) [two](swap.md#nothing)\n")
    done = build(checkout, tmp_path / "broken")
    assert done.returncode == 1
    assert "'nothing.md'" in done.stderr and "'swap.md#nothing'" in done.stderr
