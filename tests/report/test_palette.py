"""The page's colours, to eyes that see fewer of them and on white paper.

A distance of 2.3 is just noticeable side by side; 20 leaves room for thin lines. A contrast of 4.5 is WCAG's for text.
"""

import numpy
import pandas
import pytest

from verl_clipx.report.palette import COLOURS, GRPO, OTHERS, with_colours
from verl_clipx.runs.run import Run
from verl_clipx.runs.settings import Setting

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "normal": numpy.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
_XYZ = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = numpy.array([0.9505, 1.0, 1.089])


def linear(colours):
    """`#rrggbb` without gamma: (colours, 3)."""
    channels = numpy.array([[int(one[start : start + 2], 16) / 255 for start in (1, 3, 5)] for one in colours])
    return numpy.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE 1976, whose distances are those that eyes see."""
    xyz = rgb @ _XYZ.T / _WHITE
    x, y, z = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return numpy.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_stay_apart_and_stand_out_from_paper(vision):
    seen = lab(numpy.clip(linear(COLOURS) @ numpy.transpose(VISIONS[vision]), 0, 1))
    distances = numpy.linalg.norm(seen[:, :, None] - seen[:, None], axis=0)
    assert distances[~numpy.eye(len(COLOURS), dtype=bool)].min() > 20
    # WCAG's contrast with white.
    assert (1.05 / (linear(COLOURS) @ _XYZ[1] + 0.05)).min() > 4.5


def colours(*methods: str) -> list[str]:
    """The colours of settings of these methods."""
    runs = [Run(method, pandas.DataFrame(), {"clipx.method": method}) for method in methods]
    return [setting.colour for setting in with_colours([Setting(run.method, [run]) for run in runs])]


def test_the_colour_of_grpo_is_its_own_and_there_are_few_others():
    assert colours("acpo", "bapo") == list(OTHERS[:2])
    assert colours("acpo", "grpo", "grpo") == [OTHERS[0], GRPO, OTHERS[1]]
    with pytest.raises(ValueError, match="4 settings: a report tells 3 besides GRPO apart"):
        colours("acpo", "bapo", "dgpo", "gppo")
