"""The figures that README, docs and the site's pages of methods show: no two texts of a drawing overlap, in a browser
420 and 1280 pixels wide; which figures are pictures, whose texts no program can measure. Not covered: those pictures,
which people look at, what the figures draw, other fonts than this machine's. tests/analysis/report has those of
`clipx report`.
"""

import re
import runpy

import pytest

from tests.analysis.report.browser import OVERLAPPING, open_page
from tests.claims.documents import PAGES, ROOT, links_of
from verl_clipx.losses.methods import BUILT_IN, METHODS

FIGURES = ROOT / "docs" / "figures"
# Made by scripts that are gone; their pages name the commits.
PICTURES = {"bapo_counted.png", "evidence.png", "micro_batch_bounds.png", "reversal.png"}
DRAWINGS = sorted(path.name for path in FIGURES.glob("*.svg"))
WIDTHS = [420, 1280]


def find_overlaps(drawings: list[str], folder) -> dict[int, dict]:
    """Returns by width what overlaps in drawings that are as wide as the page."""
    texts = [drawing[drawing.index("<svg") :] for drawing in drawings]
    page = folder / "drawings.html"
    style = "<style>body { margin: 0 } svg { display: block; width: 100%; height: auto; overflow: hidden }</style>"
    page.write_text(f"<!doctype html><meta charset='utf-8'>{style}{''.join(texts)}", encoding="utf-8")
    overlaps_by_width, console = open_page(page, folder, WIDTHS, OVERLAPPING)
    assert console == []
    return overlaps_by_width


def test_each_figure_is_shown_by_a_page_and_is_a_drawing_or_a_known_picture():
    shown = {link.rpartition("/")[2] for page in PAGES for link in links_of(page.read_text()) if "figures/" in link}
    assert shown == {*DRAWINGS, *PICTURES} == {path.name for path in FIGURES.iterdir()}


def test_a_drawing_becomes_as_wide_as_its_page():
    for name in DRAWINGS:
        assert re.search(r"<svg [^>]*viewBox=", (FIGURES / name).read_text()), name


def test_texts_that_overlap_are_found(tmp_path):
    texts = '<text x="10" y="20">▼ 24</text><text x="30" y="20">○ 23 outside its bounds</text>'
    other_text = '<text x="10" y="60">a line below</text>'
    overlaps_by_width = find_overlaps([f'<svg viewBox="0 0 348 100">{texts}{other_text}</svg>'], tmp_path)
    assert [*overlaps_by_width] == WIDTHS
    for overlaps in overlaps_by_width.values():
        assert overlaps["pairs"] == [["○ 23 outside its bounds", "▼ 24"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWINGS)
def test_no_two_texts_of_a_drawing_overlap(name, tmp_path):
    for overlaps in find_overlaps([(FIGURES / name).read_text()], tmp_path).values():
        assert overlaps["texts"] > 5 and overlaps["pairs"] == []


@pytest.mark.slow
def test_no_two_texts_of_a_methods_figure_overlap(tmp_path):
    draw_weights = runpy.run_path(str(ROOT / "scripts" / "weight_figure.py"))["draw_weights"]
    drawings = [draw_weights(METHODS[name]()) for name in BUILT_IN]
    for overlaps in find_overlaps(drawings, tmp_path).values():
        assert overlaps["texts"] > 20 * len(BUILT_IN) and overlaps["pairs"] == []
