"""Where the texts of a Matplotlib figure stand, by its renderer."""

from typing import NamedTuple

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure


class DrawnText(NamedTuple):
    """A line of text, and its box in the figure's pixels, from its lower left corner."""

    text: str
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "DrawnText") -> bool:
        """Return whether the two boxes share an area."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.top, other.top) - max(self.bottom, other.bottom)
        return across > 0 and down > 0


class TextRecorder(RendererAgg):
    """Keeps what is drawn as text, so that what a figure holds and doesn't draw doesn't count."""

    def __init__(self, figure: Figure):
        super().__init__(*figure.bbox.size, figure.dpi)
        self.drawn: list[DrawnText] = []

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        width, height, descent = self.get_text_width_height_descent(s, prop, ismath)
        corners = numpy.array([(0, -descent), (width, -descent), (0, height - descent), (width, height - descent)])
        sine = numpy.sin(numpy.radians(angle))
        cosine = numpy.cos(numpy.radians(angle))
        # y is that of the baseline, from the top.
        places = corners @ [[cosine, sine], [-sine, cosine]] + [x, self.height - y]
        self.drawn.append(DrawnText(s, *places.min(axis=0), *places.max(axis=0)))


def list_drawn_texts(figure: Figure) -> list[DrawnText]:
    """Return each line of text that a figure draws."""
    FigureCanvasAgg(figure)
    recorder = TextRecorder(figure)
    figure.draw(recorder)
    return recorder.drawn


def find_overlapping(texts: list[DrawnText]) -> list[tuple[str, str]]:
    """Return the pairs of texts that stand on each other."""
    return [
        (text.text, other.text) for index, text in enumerate(texts) for other in texts[:index] if text.overlaps(other)
    ]


def find_cut_off(texts: list[DrawnText], figure: Figure) -> list[str]:
    """Return the texts that a figure cuts off."""
    width, height = figure.bbox.size
    return [
        text.text
        for text in texts
        if text.left < -1 or text.bottom < -1 or text.right > width + 1 or text.top > height + 1
    ]
