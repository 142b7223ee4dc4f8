"""Opens pages in Chromium, at widths that the browser's own window cannot have."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)
# Of the lines on stderr, those that a page's script or its security policy wrote.
CONSOLE = re.compile(r":CONSOLE[:(].*")
SECONDS = 60
FRAMES = """<!doctype html><meta charset="utf-8"><body>{frames}<output></output><script>
var frames = document.querySelectorAll("iframe"), found = {{}};
frames.forEach(function (frame) {{
  frame.addEventListener("load", function () {{
    var page = frame.contentDocument;
    found[frame.width] = {script};
    var all = Object.keys(found).length === frames.length;
    if (all) document.querySelector("output").textContent = JSON.stringify(found);
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
    """By width what a JavaScript expression of `page`, a frame's document, is there; and the console's lines.

    The browser's own window cannot be narrow.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser, "the page's test needs Debian's Chromium: apt-get install --no-install-recommends chromium"
    text = escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(
        f'<iframe width="{one}" height="4000" style="border:0" srcdoc="{text}"></iframe>' for one in widths
    )
    (folder / "frames.html").write_text(FRAMES.format(frames=frames, script=script), encoding="utf-8")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'browser'}", f"--window-size={max(widths)},4000"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    console = [found[0] for line in done.stderr.splitlines() if (found := CONSOLE.search(line))]
    output = re.search(r"<output>(.*?)</output>", done.stdout, re.S)
    assert output and output[1], f"the page did not load:\n{done.stderr[-3000:]}"
    return {int(width): found for width, found in json.loads(unescape(output[1])).items()}, console
