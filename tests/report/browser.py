"""A page opened in headless Chromium: what stands in it, what its console said, how it looks."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)
# Of the lines on stderr, those that a page's script or its security policy wrote.
CONSOLE = re.compile(r":CONSOLE[:(].*")
SECONDS = 60


@dataclass(frozen=True)
class Opened:
    """What a browser saw.

    Args:
        found: what the script returned.
        console: lines of the page's console.
    """

    found: dict
    console: list[str]


def chromium() -> str:
    """The browser's program.

    Raises:
        AssertionError: there is none; says how to install it.
    """
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "the page's test needs Debian's Chromium: apt-get install --no-install-recommends chromium"
    return found


def open_page(page: Path, folder: Path, width: int, script: str) -> Opened:
    """Opens a page in a frame of a width, as the browser's own window cannot be narrow, and runs a script in it.

    Args:
        page: the file.
        folder: for the browser's files.
        width: in CSS pixels.
        script: a JavaScript expression of `page`, the frame's document; its value goes through JSON.
    """
    text = escape(page.read_text(encoding="utf-8"), quote=True)
    (folder / "frame.html").write_text(
        f"""<!doctype html><meta charset="utf-8"><body>
<iframe style="width:{width}px;height:4000px;border:0" srcdoc="{text}"></iframe><output></output><script>
document.querySelector("iframe").addEventListener("load", function (event) {{
  var page = event.target.contentDocument;
  document.querySelector("output").textContent = JSON.stringify({script});
}});
</script>""",
        encoding="utf-8",
    )
    command = [chromium(), *FLAGS, f"--user-data-dir={folder / 'browser'}", f"--window-size={max(width, 500)},4000"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", (folder / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    console = [found[0] for line in done.stderr.splitlines() if (found := CONSOLE.search(line))]
    output = re.search(r"<output>(.*?)</output>", done.stdout, re.S)
    assert output and output[1], f"the page did not load:\n{done.stderr[-3000:]}"
    return Opened(json.loads(unescape(output[1])), console)
