"""Opens pages in Chromium, at widths that the browser's own window cannot have."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
# Of the lines on stderr, those that a page's script or its security policy wrote.
CONSOLE_LINE = re.compile(r":CONSOLE[:(].*")
TIMEOUT_IN_SECONDS = 60
# A page with a frame for each width. When all have loaded, what the script is in each is written into <output>.
PAGE_OF_FRAMES = """<!doctype html><meta charset="utf-8"><body>{frames}<output></output><script>
var frames = document.querySelectorAll("iframe"), results = {{}};
frames.forEach(function (frame) {{
  frame.addEventListener("load", function () {{
    var page = frame.contentDocument;
    results[frame.width] = {script};
    var all = Object.keys(results).length === frames.length;
    if (all) document.querySelector("output").textContent = JSON.stringify(results);
  }});
}});
</script>"""

# Of all pairs of texts in drawings, those whose boxes share more than a rounding error, when everything is unfolded and
# a token is chosen; and how many texts there are. Drawings may overflow, so that texts of two of them count too.
OVERLAPPING = """
(function () {
  page.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  var token = page.querySelector(".tokens i");
  if (token) token.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  var texts = Array.prototype.filter.call(page.querySelectorAll("svg text"), function (node) {
    return node.textContent.trim() && node.getBoundingClientRect().width > 0;
  });
  var boxes = texts.map(function (node) { return node.getBoundingClientRect(); }), pairs = [];
  boxes.forEach(function (box, i) {
    boxes.slice(0, i).forEach(function (other, j) {
      var across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      var down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (across > 0.1 && down > 0.1) pairs.push([texts[i].textContent, texts[j].textContent]);
    });
  });
  return { texts: texts.length, pairs: pairs };
})()
"""


def open_page(page: Path, folder: Path, widths: list[int], script: str) -> tuple[dict[int, dict], list[str]]:
    """Open a page in frames, since the browser's own window cannot be narrow.

    Args:
        page: the file.
        folder: for the browser's files.
        widths: of the frames, in pixels.
        script: a JavaScript expression, in which `page` is a frame's document.

    Returns:
        From a width to what the expression is there; and the lines of the console.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser, "the page's test needs Debian's Chromium: apt-get install --no-install-recommends chromium"
    text = escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(
        f'<iframe width="{width}" height="4000" style="border:0" srcdoc="{text}"></iframe>' for width in widths
    )
    (folder / "frames.html").write_text(PAGE_OF_FRAMES.format(frames=frames, script=script), encoding="utf-8")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'browser'}", f"--window-size={max(widths)},4000"]
    run = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_IN_SECONDS,
    )
    console_lines = [match[0] for match in map(CONSOLE_LINE.search, run.stderr.splitlines()) if match]
    output = re.search(r"<output>(.*?)</output>", run.stdout, re.S)
    assert output and output[1], f"the page did not load:\n{run.stderr[-3000:]}"
    results = json.loads(unescape(output[1]))
    return {int(width): result for width, result in results.items()}, console_lines
