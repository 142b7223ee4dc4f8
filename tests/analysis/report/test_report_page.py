"""The page of `clipx report` in a browser, 1200 and 400 pixels wide: order and folds, figures, an empty console, tokens
by mouse, tap and keyboard, the rule's switch, a completion that looks like markup; that no two texts of its figures
overlap, 1280 and 420 pixels wide, in the fonts of this machine. Not covered: how it looks otherwise (screenshots are
for people), other browsers and fonts.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.analysis.report.browser import OVERLAPPING, open_page
from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import UNSAFE, write_run
from verl_clipx.analysis.demo.files import PAGE, SHIPPED

pytestmark = pytest.mark.slow

# What a reader sees and does, in this order: the page as it opens; tokens by keyboard, mouse and tap; the switch of
# rules; all folds opened.
VISIT = """
(function () {
  function list(selector, root) { return Array.prototype.slice.call((root || page).querySelectorAll(selector)); }
  var visit = {}, tokens = list(".tokens i"), holder = page.querySelector(".tokens");
  function markedToken() { return tokens.indexOf(page.querySelector(".on")); }
  function press(key) { holder.dispatchEvent(new KeyboardEvent("keydown", { key: key, bubbles: true })); }
  function point(token) { token.dispatchEvent(new MouseEvent("mouseover", { bubbles: true })); }
  function tap(token) { token.dispatchEvent(new MouseEvent("click", { bubbles: true })); }
  function colourOf(node) { return page.defaultView.getComputedStyle(node).backgroundColor; }
  function chooseRule(rule) { page.querySelector('input[value="' + rule + '"]').click(); }
  function ruleInUse() { return page.getElementById("tokens").getAttribute("data-rule"); }
  function isOpen(node) { return !node.closest("details:not([open])"); }

  visit.foldedSections = list("details.plate").filter(function (fold) { return !fold.open; }).map(function (fold) {
    return fold.querySelector("h2").textContent;
  });
  visit.tops = ["first", "numbers", "tokens"].map(function (id) {
    return page.getElementById(id).getBoundingClientRect().top;
  });
  visit.openLines = list(".line").filter(isOpen).length;

  visit.markedAfterKey = [];
  ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "End", "ArrowRight", "Home", "Escape"].forEach(function (key) {
    press(key);
    visit.markedAfterKey.push(markedToken());
  });
  point(tokens[5]);
  visit.pointedToken = markedToken();
  tap(tokens[7]);
  visit.tappedToken = markedToken();
  visit.detail = page.querySelector(".detail").textContent;

  visit.ruleAtFirst = ruleInUse();
  visit.ruleActsInFirstLine = list(".tokens").map(function (completion) {
    return list(".g-low, .g-high", completion.querySelector(".line")).length > 0;
  });
  chooseRule("own");
  var keptByOwnRule = page.querySelector(".tokens .kept.g-high"), colourByOwnRule = colourOf(keptByOwnRule);
  chooseRule("grpo");
  visit.ruleChangesColour = colourByOwnRule !== colourOf(keptByOwnRule);
  visit.ruleAfterSwitch = ruleInUse();

  list("details").forEach(function (fold) { fold.open = true; });
  visit.tokens = tokens.length;
  visit.tokensOfLine = list("i", page.querySelector(".line")).length;
  var unsafe = tokens.filter(function (node) { return /onerror/.test(node.textContent); });
  point(unsafe[0]);
  visit.unsafeTexts = unsafe.map(function (node) { return node.textContent; });
  visit.images = page.images.length;
  visit.title = page.title;
  visit.figures = list("figure svg").filter(function (svg) {
    var box = svg.getBoundingClientRect();
    return box.width > 250 && box.height > 100;
  }).length;
  visit.width = page.documentElement.scrollWidth;
  visit.smallestText = Math.min.apply(null, list("svg text").map(function (node) {
    var matrix = node.getScreenCTM(), size = page.defaultView.getComputedStyle(node).fontSize;
    return parseFloat(size) * Math.hypot(matrix.a, matrix.b);
  }));
  return visit;
})()
"""


class Visits(NamedTuple):
    """A page that was opened.

    Args:
        page: its file.
        by_width: from a width in pixels to what VISIT found.
        console_lines: what the page wrote to the console.
    """

    page: Path
    by_width: dict[int, dict]
    console_lines: list[str]


@pytest.fixture(scope="module")
def visits(tmp_path_factory) -> Visits:
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / f"{method}-seed1", method) for method in ("grpo", "acpo")]
    clipx("report", *runs, "--out", folder / "out")
    page = folder / "out" / "report.html"
    by_width, console_lines = open_page(page, folder, [1200, 400], VISIT)
    return Visits(page=page, by_width=by_width, console_lines=console_lines)


@pytest.fixture(params=[1200, 400], ids=["1200 pixels", "400 pixels"])
def width(request) -> int:
    return request.param


@pytest.fixture
def visit(visits, width) -> dict:
    return visits.by_width[width]


def test_the_console_stays_empty(visits):
    assert visits.console_lines == []


def test_picture_table_and_responses_come_first_and_what_says_nothing_is_folded(visit, width):
    assert visit["tops"] == sorted(visit["tops"])
    assert visit["tops"][0] < (400 if width == 1200 else 700)
    # One of each run.
    assert visit["openLines"] == 2
    assert visit["foldedSections"] == ["Gradient mass outside the bounds", "What else was logged"]


def test_the_figures_fit_the_page_and_can_be_read(visit, width):
    # Three outcomes, ACPO's bounds, three figures of each of two settings, and three charts of other metrics.
    assert visit["figures"] == 3 + 1 + 3 * 2 + 3
    assert visit["width"] <= width
    assert visit["smallestText"] >= 9


def test_tokens_are_chosen_by_keyboard_mouse_and_tap(visit):
    last = visit["tokens"] - 1
    # Right, right, left, down, end, right, home, escape.
    assert visit["markedAfterKey"] == [0, 1, 0, visit["tokensOfLine"], last, last, 0, -1]
    assert visit["pointedToken"] == 5
    assert visit["tappedToken"] == 7
    assert "GRPO0.8 to 1.2" in visit["detail"]
    assert "ratio" in visit["detail"]


def test_tokens_are_judged_by_grpo_s_rule_until_another_one_is_chosen(visit):
    assert visit["ruleAtFirst"] == "grpo"
    # It clips some token of the response of each run.
    assert visit["ruleActsInFirstLine"] == [True, True]
    assert visit["ruleChangesColour"]
    assert visit["ruleAfterSwitch"] == "grpo"


def test_a_completion_that_looks_like_markup_stays_text(visit):
    assert set(visit["unsafeTexts"]) == {UNSAFE}
    assert visit["images"] == 0
    assert visit["title"].startswith("GRPO clipped ")


@pytest.mark.parametrize("of_demo", [False, True], ids=["made-up runs", "the demo"])
def test_no_two_texts_of_its_figures_overlap(of_demo, visits, tmp_path):
    page = SHIPPED / PAGE if of_demo else visits.page
    by_width, _ = open_page(page, tmp_path, [420, 1280], OVERLAPPING)
    assert by_width[420]["pairs"] == []
    assert by_width[1280]["pairs"] == []
    # A wide page has the five numbers of the chosen token's ruler too.
    assert by_width[420]["texts"] > 150
    assert by_width[1280]["texts"] == by_width[420]["texts"] + 5
