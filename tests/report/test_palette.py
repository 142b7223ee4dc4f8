"""The page's colours, to eyes that see fewer of them and on white paper; the measures themselves, by hand.

A distance of 2.3 is just noticeable side by side; 20 leaves room for thin lines. A contrast of 4.5 is WCAG's for text.
"""

import itertools

import numpy
import pandas
import pytest
from numpy.typing import NDArray

from verl_clipx.report.palette import COLOURS, GRPO, OTHERS, with_colours
from verl_clipx.runs.run import Run
from verl_clipx.runs.settings import Setting

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "normal": numpy.eye(3),
    "protanopia": numpy.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": numpy.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": numpy.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = numpy.array([0.9505, 1.0, 1.089])


def smallest_distance(colours: tuple[str, ...], vision: str) -> float:
    """The distance of the two closest colours, `#rrggbb`, under a key of VISIONS; CIE 1976."""
    seen = [_lab(numpy.clip(VISIONS[vision] @ _linear(colour), 0, 1)) for colour in colours]
    return min(float(numpy.linalg.norm(one - two)) for one, two in itertools.combinations(seen, 2))


def contrast_with_white(colour: str) -> float:
    """WCAG's contrast ratio with white, 1 to 21."""
    return float(1.05 / (_linear(colour) @ _XYZ[1] + 0.05))


def _linear(colour: str) -> NDArray:
    channels = numpy.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return numpy.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def _lab(rgb: NDArray) -> NDArray:
    xyz = _XYZ @ rgb / _WHITE
    f = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return numpy.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colours_stay_apart_and_stand_out_from_paper():
    distances = {vision: smallest_distance(COLOURS, vision) for vision in VISIONS}
    assert min(distances.values()) > 20 and min(map(contrast_with_white, COLOURS)) > 4.5


def test_the_measures_themselves():
    assert contrast_with_white("#000000") == pytest.approx(21)
    # Black and white are 100 apart in lightness alone.
    assert smallest_distance(("#000000", "#ffffff"), "normal") == pytest.approx(100, abs=0.1)
    # Red and green of one lightness: far apart, and much closer under deuteranopia.
    red, green = "#b03000", "#607000"
    assert smallest_distance((red, green), "deuteranopia") < 0.5 * smallest_distance((red, green), "normal")


def colours(*methods: str) -> list[str]:
    """The colours of settings of these methods."""
    runs = [Run(method, pandas.DataFrame(), {"clipx.method": method}) for method in methods]
    return [setting.colour for setting in with_colours([Setting(run.method, [run]) for run in runs])]


def test_the_colour_of_grpo_is_its_own_and_there_are_few_others():
    assert colours("acpo", "bapo") == list(OTHERS[:2])
    assert colours("acpo", "grpo", "grpo") == [OTHERS[0], GRPO, OTHERS[1]]
    with pytest.raises(ValueError, match="4 settings: a report tells 3 besides GRPO apart"):
        colours("acpo", "bapo", "dgpo", "gppo")
