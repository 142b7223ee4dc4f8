"""The page of `clipx report` in a browser, 1200 and 400 pixels wide: order and folds, figures, an empty console, tokens
by mouse, tap and keyboard, the rule's switch, a completion that looks like markup; that no two texts of its figures
overlap, 1280 and 420 pixels wide, in the fonts of this machine. Not covered: how it looks otherwise (screenshots are
for people), other browsers and fonts.
"""

import pytest

from tests.analysis.report.browser import OVERLAPPING, open_page
from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import UNSAFE, write_run
from verl_clipx.analysis.demo.files import PAGE, SHIPPED

pytestmark = pytest.mark.slow

LOOK = """
(function () {
  var view = page.getElementById("tokens"), holder = page.querySelector(".tokens");
  var detail = page.querySelector(".detail");
  function press(key) { holder.dispatchEvent(new KeyboardEvent("keydown", { key: key, bubbles: true })); }
  function marked() { return Array.prototype.indexOf.call(tokens, page.querySelector(".on")); }
  function tone(node) { return page.defaultView.getComputedStyle(node).backgroundColor; }
  var tokens = page.querySelectorAll(".tokens i"), steps = [], found = {};
  var folds = Array.prototype.slice.call(page.querySelectorAll("details.plate"));
  found.folded = folds.filter(function (fold) { return !fold.open; }).map(function (fold) {
    return fold.querySelector("h2").textContent;
  });
  found.first = ["first", "numbers", "tokens"].map(function (name) {
    return (page.getElementById(name) || page.querySelector("." + name)).getBoundingClientRect().top;
  });
  found.lines = Array.prototype.filter.call(page.querySelectorAll(".line"), function (line) {
    return !line.closest("details:not([open])");
  }).length;
  ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "End", "ArrowRight", "Home", "Escape"].forEach(function (key) {
    press(key); steps.push(marked());
  });
  tokens[5].dispatchEvent(new MouseEvent("mouseover", { bubbles: true })); found.pointed = marked();
  tokens[7].dispatchEvent(new MouseEvent("click", { bubbles: true })); found.tapped = marked();
  found.detail = detail.textContent;
  found.opens = view.getAttribute("data-rule");
  found.acted = Array.prototype.map.call(page.querySelectorAll(".tokens"), function (one) {
    return one.querySelector(".line").querySelectorAll(".g-low, .g-high").length > 0;
  });
  page.querySelector('input[value="own"]').click();
  var other = page.querySelector(".tokens .kept.g-high"), before = tone(other);
  page.querySelector('input[value="grpo"]').click();
  found.switched = [before === tone(other), view.getAttribute("data-rule")];
  var unsafe = Array.prototype.filter.call(tokens, function (node) { return /onerror/.test(node.textContent); });
  page.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  found.steps = steps; found.tokens = tokens.length; 
  found.line = page.querySelector(".line").querySelectorAll("i").length;
  unsafe[0].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  found.figures = Array.prototype.filter.call(page.querySelectorAll("figure svg"), function (svg) {
    var box = svg.getBoundingClientRect(); return box.width > 250 && box.height > 100;
  }).length;
  found.unsafe = unsafe.map(function (node) { return node.textContent; });
  found.images = page.images.length; found.title = page.title;
  found.wide = page.documentElement.scrollWidth;
  found.small = Math.min.apply(null, Array.prototype.map.call(page.querySelectorAll("svg text"), function (node) {
    var matrix = node.getScreenCTM(), size = page.defaultView.getComputedStyle(node).fontSize;
    return parseFloat(size) * Math.hypot(matrix.a, matrix.b);
  }));
  return found;
})()
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """By width what the script found, the lines of the console, and the page."""
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / f"{method}-seed1", method) for method in ("grpo", "acpo")]
    clipx("report", *runs, "--out", folder / "out")
    page = folder / "out" / "report.html"
    return *open_page(page, folder, [1200, 400], LOOK), page


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_at(opened, width):
    found, wide = opened[0][width], width > 1000
    assert opened[1] == []
    # Picture, table and one response come first, and what says nothing is folded.
    assert found["first"] == sorted(found["first"]) and found["first"][0] < (400 if wide else 700)
    # The tokens are judged by GRPO's rule, and it acts in the answers that stand there.
    assert found["opens"] == "grpo" and found["acted"] == [True, True]
    assert found["lines"] == 2
    assert found["folded"] == ["Gradient mass outside the bounds", "What else was logged"]
    # Three outcomes, ACPO's bounds, three figures of two settings each, and three charts of other metrics.
    assert found["figures"] == 3 + 1 + 3 * 2 + 3
    # Nothing sticks out.
    assert found["wide"] <= width and found["small"] >= 9
    # Tokens by keyboard, mouse and tap, and the switch of rules.
    last = found["tokens"] - 1
    assert found["steps"] == [0, 1, 0, found["line"], last, last, 0, -1]
    assert (found["pointed"], found["tapped"]) == (5, 7)
    assert "GRPO0.8 to 1.2" in found["detail"] and "ratio" in found["detail"]
    assert found["switched"] == [False, "grpo"]
    # A completion that looks like markup stays text.
    assert set(found["unsafe"]) == {UNSAFE}
    assert found["images"] == 0 and found["title"].startswith("GRPO clipped ")


@pytest.mark.parametrize("of_demo", [False, True], ids=["made-up runs", "the demo"])
def test_no_two_texts_of_its_figures_overlap(of_demo, opened, tmp_path):
    page = SHIPPED / PAGE if of_demo else opened[2]
    found, _ = open_page(page, tmp_path, [420, 1280], OVERLAPPING)
    assert {width: seen["pairs"] for width, seen in found.items()} == {420: [], 1280: []}
    # A wide page has the five numbers of the chosen token's ruler too.
    assert found[420]["texts"] > 150 and found[1280]["texts"] == found[420]["texts"] + 5
