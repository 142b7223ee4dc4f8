"""The site of docs: its navigation, the methods' pages, links out of docs, and that the build of scripts/test.sh, with
the validation of mkdocs.yml, fails for a link to a missing page or anchor. With `-m matrix` the whole site is built,
and takes nothing from another site. Not covered: links to other sites, how the site looks.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from mkdocs.utils.yaml import yaml_load

from tests.claims.documents import PAGES, ROOT, inline_code_of
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.papers.tables.definition import table_names
from verl_clipx.run.listing import describe_methods

# MkDocs, too, loads it by its path.
site_pages = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "site_pages.py")))

NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])


def test_every_page_is_in_the_navigation_and_that_of_papers_names_every_table():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"methods/{name}.md" for name in BUILT_IN} | {*site_pages.ELSEWHERE.values(), "reference.md"}
    assert set(re.findall(r"[\w/.]+\.md", str(site_pages.with_method_pages(NAVIGATION)))) == pages
    names_on_page = inline_code_of((ROOT / "docs" / "papers.md").read_text(encoding="utf-8"))
    assert {*table_names()} - {*names_on_page} == set()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_methods_page_says_what_its_class_and_its_groups_say(name):
    (method,) = describe_methods(name)
    page = site_pages.method_page(method)
    assert re.search(r"\bF (?:=|is) ", page) and f"({name}.svg)" in page
    own_parameters = [parameter for parameter in method["parameters"] if not parameter["of_every_method"]]
    assert own_parameters
    for parameter in own_parameters:
        assert f"| `{parameter['name']}` | " in page
        assert parameter["allowed"].replace("|", "\\|") in page
        (_, of_first), *others = parameter["in_groups"].items()
        for group, value in others:
            assert value == of_first or f"| `+clipx={group}` | `{parameter['name']}` | " in page
    if name == "acpo":
        # What the release does differently, and why.
        assert "| `+clipx=acpo_reference` | `epsilon_max` | `null` | `3.0` | [script] highest epsilon |" in page
        assert "| `actor/clipx/epsilon` |" in page


def test_the_figures_weights_by_hand():
    weights = runpy.run_path(str(ROOT / "scripts" / "weight_figure.py"))["weights"]

    def weight_at(method, advantage, ratio):
        ratios, weights_of_ratios = weights(method, advantage, 0.1)
        return float(weights_of_ratios[(ratios - ratio).abs().argmin()])

    grpo = METHODS["grpo"](clip_high=1.4)
    assert weight_at(grpo, 1.0, 1.3) == pytest.approx(1.3, abs=2e-3)
    assert weight_at(grpo, 1.0, 1.5) == 0
    assert weight_at(grpo, -1.0, 0.7) == 0
    assert weight_at(grpo, -1.0, 1.5) == pytest.approx(1.5, abs=2e-3)
    # Without statistics ACPO's epsilon is epsilon_base.
    acpo = METHODS["acpo"](epsilon_base=0.5)
    assert weight_at(acpo, 1.0, 1.45) > 0
    assert weight_at(acpo, 1.0, 1.55) == 0
    for name in BUILT_IN:
        assert weights(METHODS[name](), -1.0, 0.4)[1].isfinite().all(), name


def test_the_site_shows_what_a_page_leaves_to_a_command():
    methods = site_pages.with_printed((ROOT / "docs" / "methods.md").read_text())
    metrics = site_pages.with_printed((ROOT / "docs" / "metrics.md").read_text())
    assert "<!-- the site shows" not in methods + metrics
    assert "| `acpo`, `acpo_reference` | " in methods
    for key in ("ratio_mean", "effective_sample_size", "clip_fraction"):
        assert f"`clipx/{key}`" in metrics
    with pytest.raises(ValueError, match="nothing"):
        site_pages.with_printed("<!-- the site shows: clipx metrics nothing -->")


def build_arguments():
    """The words of the one command in scripts/test.sh that builds the site."""
    lines = (ROOT / "scripts" / "test.sh").read_text().splitlines()
    (line,) = [line for line in lines if "mkdocs build" in line and not line.lstrip().startswith(("#", "say"))]
    return shlex.split(line.partition("mkdocs ")[2].rstrip("& "))


def run_mkdocs(*words):
    command = [sys.executable, "-m", "mkdocs", *words]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SITE_URL": "https://pages.example/"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [
        "[text](other.md#here)",
        "[text](missing.md)",
        "[text](other.md#missing)",
        "[text](#missing)",
        "![text](missing.png)",
        "[text](folder)",
        "[text](/other.md)",
    ],
)
def test_the_build_fails_for_a_link_that_leads_nowhere(tmp_path, link):
    pages = tmp_path / "docs"
    (pages / "folder").mkdir(parents=True)
    (pages / "index.md").write_text(f"# Start\n\n{link}\n")
    (pages / "other.md").write_text("# Other\n\n## Here\n")
    settings = {"docs_dir": str(pages), "site_dir": str(tmp_path / "site"), "nav": ["index.md", "other.md"]}
    # Without what makes pages out of the source, which takes half a minute.
    settings |= {"INHERIT": str(ROOT / "mkdocs.yml"), "hooks": [], "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    result = run_mkdocs(*build_arguments(), "--config-file", str(tmp_path / "mkdocs.yml"))
    if "other.md#here" in link:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1, result.stderr
        assert re.search(r"WARNING .*index\.md", result.stderr)


def test_a_link_out_of_docs_leads_to_a_page_that_shows_the_file_or_folder():
    places = {
        "README.md": "overview.md",
        "docs": "README.md",
        "docs/README.md": "README.md",
        "docs/faq.md": "faq.md",
        "docs/results/evidence.json": "results/evidence.json",
        "docs/results/runs": "source/docs/results/runs.md",
        "scripts/test.sh": "source/scripts/test.sh.md",
        # MkDocs leaves out hidden folders.
        ".github/workflows/checks.yml": "source/github/workflows/checks.yml.md",
    }
    assert {target: site_pages.place_of(target) for target in places} == places
    linked = site_pages.linked_files("[a](evidence.md) [b](runs) [c](../../scripts/test.sh#x)", "results/page.md")
    assert linked == {"docs/results/runs", "scripts/test.sh"}
    assert "\nevidence\n" in site_pages.shown("docs/results/runs")
    with pytest.raises(FileNotFoundError, match=r"missing\.sh"):
        site_pages.shown("scripts/missing.sh")


@pytest.mark.slow
def test_a_coding_assistant_finds_every_page_as_markdown_by_its_title(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# Start here\n\n[The tests](../scripts/test.sh)\n")
    (pages / "mac_windows.md").write_text("# Mac and Windows\n")
    # Without what makes pages out of the source, which takes half a minute.
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import runpy\n"
        f"made = runpy.run_path({str(ROOT / 'scripts' / 'site_pages.py')!r})\n"
        "on_nav = made['on_nav']\n"
        "on_page_markdown = made['on_page_markdown']\n"
    )
    with open(ROOT / "mkdocs.yml") as file:
        plugins = yaml_load(file)["plugins"]
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(pages),
        "site_dir": str(tmp_path / "site"),
        "nav": [{"Try": ["index.md", "mac_windows.md"]}],
        "hooks": [str(hook)],
        "plugins": [plugin for plugin in plugins if "llms-source" in plugin],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    result = run_mkdocs("build", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert result.returncode == 0, result.stderr
    listed = (tmp_path / "site" / "llms.txt").read_text().splitlines()
    assert "- [Start here](https://pages.example/index.md)" in listed
    assert "- [Mac and Windows](https://pages.example/mac_windows.md)" in listed
    # As in the HTML, a link out of docs leads to the page that shows the file.
    assert "[The tests](source/scripts/test.sh.md)" in (tmp_path / "site" / "index.md").read_text()


def test_links_are_written_in_markdown_since_the_build_checks_no_other():
    html = re.compile(r"<(?:a|img)\b[^>]*\b(?:href|src)=", re.IGNORECASE)
    assert [page.name for page in PAGES if html.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.matrix
def test_the_site_loads_nothing_from_another(tmp_path):
    result = run_mkdocs(*build_arguments(), "--site-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    # MkDocs only mentions a link to what it leaves out of the site.
    assert "contains a link" not in result.stderr
    kinds = r"script|img|link rel=\"(?:stylesheet|preload|preconnect)\""
    loads = re.compile(rf"<(?:{kinds})[^>]*(?:src|href)=\"(?:https?:)?//")
    listed = re.findall(r"\]\(https://pages\.example/(\S+\.md)\)", (tmp_path / "llms.txt").read_text())
    assert set(listed) == set(re.findall(r"[\w/.]+\.md", str(site_pages.with_method_pages(NAVIGATION))))
    assert [page for page in listed if not (tmp_path / page).is_file()] == []
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60 and [path for path in pages if loads.search(path.read_text())] == []
