"""The page of `clipx report` in a browser.

Covers: what comes first and what is folded; figures and tokens are there at 1200 and 400 pixels without anything that
sticks out, no line in the console, time to load, moving through tokens by mouse, tap and keyboard, the rule's switch, a
completion that looks like markup. Not covered: how it looks (screenshots are for people), other browsers.
"""

import pytest

from tests.report.browser import open_page
from tests.runs.commands import clipx
from tests.runs.example_runs import UNSAFE, write_run

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
  found.first = ["summary", "ratios", "tokens", "words"].map(function (name) {
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
  var other = page.querySelector(".tokens .kept.g-high"), before = tone(other);
  page.querySelector('input[value="grpo"]').click();
  found.switched = [before === tone(other), view.getAttribute("data-rule")];
  page.querySelector('input[value="r0"]').click();
  found.replayed = [view.getAttribute("data-rule"), /bapo: /.test(detail.textContent)];
  found.dashed = Array.prototype.filter.call(tokens, function (node) {
    return page.defaultView.getComputedStyle(node).outlineStyle === "dashed";
  }).length === view.querySelectorAll(".r0-other:not(.on)").length;
  var unsafe = Array.prototype.filter.call(tokens, function (node) { return /onerror/.test(node.textContent); });
  page.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  found.steps = steps; found.tokens = tokens.length; 
  found.line = page.querySelector(".line").querySelectorAll("i").length;
  unsafe[0].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  found.figures = Array.prototype.filter.call(page.querySelectorAll("figure svg"), function (svg) {
    var box = svg.getBoundingClientRect(); return box.width > 250 && box.height > 100;
  }).length;
  found.unsafe = unsafe.map(function (node) { return node.textContent; });
  found.alone = Array.prototype.map.call(page.querySelectorAll(".alone"), function (one) {
    return Math.round(Math.max.apply(null, Array.prototype.map.call(one.querySelectorAll("svg"), function (svg) {
      return svg.getBoundingClientRect().width;
    })));
  });
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
    """By width what the script found, and the lines of the console."""
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / f"{method}-seed1", method) for method in ("grpo", "acpo")]
    clipx("report", *runs, "--out", folder / "out", "--replay", "+clipx=bapo")
    return open_page(folder / "out" / "report.html", folder, [1200, 400], LOOK)


def test_the_console_stays_empty(opened):
    assert opened[1] == []


@pytest.mark.parametrize("width", [1200, 400])
def test_table_picture_and_one_response_come_first_and_what_says_nothing_is_folded(opened, width):
    found = opened[0][width]
    assert found["first"] == sorted(found["first"]) and found["first"][1] < (700 if width > 1000 else 1200)
    assert found["lines"] == 2
    hard = ["Gradient mass by probability", "Gradient mass outside the bounds"]
    assert found["folded"] == [*hard, "What else was logged"]


@pytest.mark.parametrize("width", [1200, 400])
def test_every_figure_is_there_and_nothing_sticks_out(opened, width):
    found = opened[0][width]
    # Three outcomes, ACPO's bounds, six figures of two settings each, and three charts of other metrics.
    assert found["figures"] == 3 + 1 + 6 * 2 + 3
    # A panel by itself fills both columns where there are two.
    assert found["alone"] == [720 if width > 1000 else 348] * 3
    assert found["wide"] <= width and found["small"] >= 9


@pytest.mark.parametrize("width", [1200, 400])
def test_tokens_by_keyboard_mouse_and_tap_and_the_switch_of_rules(opened, width):
    found = opened[0][width]
    last = found["tokens"] - 1
    assert found["steps"] == [0, 1, 0, found["line"], last, last, 0, -1]
    assert (found["pointed"], found["tapped"]) == (5, 7)
    assert "GRPO0.8 to 1.2" in found["detail"] and "ratio" in found["detail"]
    assert found["switched"] == [False, "grpo"]
    assert found["replayed"] == ["r0", True] and found["dashed"]


@pytest.mark.parametrize("width", [1200, 400])
def test_a_completion_that_looks_like_markup_stays_text(opened, width):
    found = opened[0][width]
    assert set(found["unsafe"]) == {UNSAFE}
    assert found["images"] == 0 and found["title"].startswith("GRPO against ACPO")
