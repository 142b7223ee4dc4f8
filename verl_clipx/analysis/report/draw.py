"""The third step of the page: draws its figures, from the analysis alone."""

from typing import NamedTuple

from verl_clipx.analysis.report.analysis import Analysis
from verl_clipx.analysis.report.drawing import Panel
from verl_clipx.analysis.report.log_figures import draw_bounds, draw_charts, draw_clipped_shares, draw_mass
from verl_clipx.analysis.report.trace_figures import draw_spreads


class Plate(NamedTuple):
    """The figures under one heading.

    Args:
        name: by it templates/captions.html chooses the heading and the words around the figures.
        panels: the figures. `draw_plates` returns no plate without any.
    """

    name: str
    panels: list[Panel]


def draw_plates(analysis: Analysis) -> list[Plate]:
    """Draw the plates for which the runs have something to show.

    They come in the order of the page: tokens, outcome, what the method does (bounds, clipping and gradient mass),
    samples, and other metrics that declare a chart.
    """
    # Where a setting's logs lack the plugin's share of clipped tokens, the same plate shows verl's.
    clipped_panels = [*draw_clipped_shares(analysis.clipped), *draw_charts(analysis.clipped_by_verl)]
    plates = [
        Plate("spread", draw_spreads(analysis.spreads)),
        Plate("outcome", draw_charts(analysis.outcomes)),
        Plate("bounds", draw_bounds(analysis.bounds)),
        Plate("fractions", clipped_panels),
        Plate("mass", draw_mass(analysis.mass)),
        Plate("samples", draw_charts(analysis.samples)),
        Plate("declared", draw_charts(analysis.declared.charts)),
    ]
    return [plate for plate in plates if plate.panels]
