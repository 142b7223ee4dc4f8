"""The page of `clipx report` in a browser.

Covers: figures and tokens are there at 1200 and 400 pixels without anything that sticks out, no line in the console,
time to load, moving through tokens by mouse, tap and keyboard, the rule's switch, a completion that looks like markup.
Not covered: how it looks (screenshots are for people), other browsers.
"""

import pytest
from typer.testing import CliRunner

from tests.report.browser import open_page
from tests.runs.example_runs import UNSAFE, write_run
from verl_clipx.cli import app

pytestmark = pytest.mark.slow

LOOK = """
(function () {
  var view = page.getElementById("tokens"), holder = page.querySelector(".tokens");
  var detail = page.querySelector(".detail");
  function press(key) { holder.dispatchEvent(new KeyboardEvent("keydown", { key: key, bubbles: true })); }
  function marked() { return Array.prototype.indexOf.call(tokens, page.querySelector(".on")); }
  function tone(node) { return page.defaultView.getComputedStyle(node).backgroundColor; }
  var tokens = page.querySelectorAll(".tokens i"), steps = [], found = {};
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
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [str(write_run(folder / f"{method}-seed1", method)) for method in ("grpo", "acpo")]
    replayed = ["--replay", "+clipx=bapo"]
    result = CliRunner().invoke(app, ["report", *runs, "--out", str(folder / "out"), *replayed])
    assert result.exit_code == 0, result.output
    return folder / "out" / "report.html"


@pytest.fixture(scope="module", params=[1200, 400])
def opened(request, page, tmp_path_factory):
    return open_page(page, tmp_path_factory.mktemp("browser"), request.param, LOOK), request.param


def test_the_console_stays_empty(opened):
    assert opened[0].console == []


def test_every_figure_is_there_and_nothing_sticks_out(opened):
    found, width = opened[0].found, opened[1]
    # Three outcomes, ACPO's bounds, seven figures of two settings each, and three charts of other metrics.
    assert found["figures"] == 3 + 1 + 7 * 2 + 3
    # A panel by itself fills both columns where there are two.
    assert found["alone"] == [720 if width > 1000 else 348] * 3
    assert found["wide"] <= width
    assert found["small"] >= 9


def test_tokens_by_keyboard_mouse_and_tap(opened):
    found = opened[0].found
    last = found["tokens"] - 1
    assert found["steps"] == [0, 1, 0, found["line"], last, last, 0, -1]
    assert (found["pointed"], found["tapped"]) == (5, 7)
    assert "GRPO0.8 to 1.2" in found["detail"] and "ratio" in found["detail"]


def test_the_switch_shows_what_grpo_would_have_done(opened):
    assert opened[0].found["switched"] == [False, "grpo"]


def test_the_switch_has_the_replayed_settings_too(opened):
    assert opened[0].found["replayed"] == ["r0", True] and opened[0].found["dashed"]


def test_a_completion_that_looks_like_markup_stays_text(opened):
    found = opened[0].found
    assert set(found["unsafe"]) == {UNSAFE}
    assert found["images"] == 0 and found["title"].startswith("GRPO against ACPO")
