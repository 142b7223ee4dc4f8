"""Matplotlib figures for the page: drawn for their width in CSS pixels, with text as text."""

import io
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from verl_clipx.common.files import replacing
from verl_clipx.report.palette import HAIR, INK, SOFT

# Every figure fits a telephone; a wide page sets two beside each other. A CSS pixel is a Matplotlib point.
WIDTH = 348
# The width of a panel that stands in a row by itself: both columns and the gap between them.
WIDE = 720
# The least distance between the labels of two ticks, in pixels.
APART = 5
# The width of a bold letter in pixels, and the most letters of a label at the end of a line.
LETTER = 6.9
LONGEST = 20
# No axis has more ticks.
MOST_TICKS = 5

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "clipx",
    "font.family": "sans-serif",
    "font.sans-serif": ["Liberation Sans", "DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": HAIR,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": HAIR,
    "ytick.color": HAIR,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "lines.linewidth": 1.6,
    "text.color": INK,
}


def figure(
    height: float, *, rows: int = 1, columns: int = 1, left: float = 44, top: float = 24, bottom: float = 38, **shared
) -> tuple[Figure, list[Axes]]:
    """An empty figure of the page's width; height and margins are in CSS pixels, `shared` is sharex and sharey."""
    drawing = Figure(figsize=(WIDTH / 72, height / 72))
    panels = drawing.subplots(rows, columns, squeeze=False, **shared)
    drawing.subplots_adjust(
        left=left / WIDTH, right=1 - 12 / WIDTH, top=1 - top / height, bottom=bottom / height, hspace=0.42, wspace=0.16
    )
    return drawing, list(panels.flat)


def style():
    """A context in which figures are made and saved in the page's style."""
    return matplotlib.rc_context(STYLE)


def label_ends(drawing: Figure, axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Labels the right ends of lines, apart from each other, and makes room for the labels.

    Args:
        axes: with its final limits.
        ends: x, y, text and colour of each.
    """
    texts = shorten([text for _, _, text, _ in ends])
    drawing.subplots_adjust(right=1 - (12 + LETTER * max(map(len, texts))) / WIDTH)
    low, high = axes.get_ylim()
    between, heights = (high - low) * 0.075, []
    rising = sorted(
        ((x, y, text, colour) for (x, y, _, colour), text in zip(ends, texts, strict=True)), key=itemgetter(1)
    )
    for _, y, _, _ in rising:
        heights.append(max(y, heights[-1] + between) if heights else y)
    # Labels that would stand above the axis push all others down.
    for at, highest in enumerate(high - between * i for i in range(len(heights))):
        heights[-1 - at] = min(heights[-1 - at], highest)
    beside = {"textcoords": "offset points", "va": "center", "weight": "bold", "annotation_clip": False}
    for (x, _, text, colour), y in zip(rising, heights, strict=True):
        axes.annotate(text, (x, y), (5, 0), color=colour, **beside)


def shorten(labels: list[str]) -> list[str]:
    """Labels of everything that is to be told apart, cut to LONGEST letters from where they begin to differ."""
    different = (place for place, letters in enumerate(zip(*labels, strict=False)) if len(set(letters)) > 1)
    start = next(different, 0)

    def cut(label: str) -> str:
        first = min(start, len(label) - LONGEST + 1)
        kept = label[first : first + LONGEST - 2]
        return f"{'…' * (first > 0)}{kept}{'…' * (first + len(kept) < len(label))}"

    return [label if len(label) <= LONGEST else cut(label) for label in labels]


def spread_ticks(drawing: Figure) -> None:
    """Takes ticks away until no two labels of a drawing's axes touch."""
    for name in ("xaxis", "yaxis"):
        axes = [getattr(one, name) for one in drawing.axes if one.axison]
        counted = [one for one in axes if isinstance(one.get_major_locator(), MaxNLocator)]
        for ticks in range(MOST_TICKS, 0, -1):
            for one in counted:
                one.get_major_locator().set_params(nbins=ticks)
            boxes = [box.padded(APART / 2) for one in axes for box in _labels(one)]
            if not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at]):
                break


def _labels(axis: Axis) -> list[Bbox]:
    """Where the labels of the ticks that are drawn stand."""
    low, high = sorted(axis.get_view_interval())
    # Places the ticks, also those outside the axis.
    axis.get_ticklabels()
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label.get_window_extent() for label in labels if label.get_visible() and label.get_text()]


def widen(drawing: Figure) -> Figure:
    """The same drawing at the width of both columns, its margins unchanged."""
    margins, height = drawing.subplotpars, drawing.get_size_inches()[1]
    scale = WIDTH / WIDE
    drawing.set_size_inches(WIDE / 72, height)
    drawing.subplots_adjust(left=margins.left * scale, right=1 - (1 - margins.right) * scale)
    return drawing


# The formats of a figure, each with matplotlib's options.
FORMATS: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 144}}


def save(drawing: Figure, folder: Path, name: str) -> None:
    """Writes a figure as SVG and PNG."""
    spread_ticks(drawing)
    for kind, options in FORMATS.items():
        with replacing(folder / f"{name}.{kind}") as partial:
            drawing.savefig(partial, format=kind, **options)


def svg_of(drawing: Figure) -> str:
    """A figure as SVG, in no file."""
    spread_ticks(drawing)
    text = io.StringIO()
    drawing.savefig(text, format="svg", **FORMATS["svg"])
    return text.getvalue()


def inline(text: str, name: str, description: str) -> Markup:
    """An SVG for the page: ids of its own under a name, no metadata, the page's fonts, a text for screen readers."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px) [^;\"]+", _font, text)
    # Only coordinates are rounded: the label of a tick is text.
    text = re.sub(r'\b(d|x|y|transform)="[^"]*"', lambda found: _LONG.sub(r"\1", found[0]), text)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()
    head = Markup(
        '<svg viewBox="0 0 {} {}" style="max-width:{}px" role="img" aria-label="{}" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg">'
    ).format(width, height, width, description)
    return head + Markup(text[text.index(">") + 1 :])


_LONG = re.compile(r"(-?\d+\.\d{2})\d+")


def _font(found: re.Match) -> str:
    bold = "; font-weight: 700" if "bold" in found[1] or "700" in found[1] else ""
    return f"font-size: {found[2]}{bold}"
