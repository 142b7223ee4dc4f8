"""The page's colours, one meaning each, and how far apart they are to people who see fewer of them."""

import itertools

import numpy
from numpy.typing import NDArray

# GRPO and its bounds, the yardstick; then the other settings that are compared, in the order in which they were named.
GRPO = "#404040"
OTHERS = ("#1f66e5", "#1d723f", "#5c2c00")
# What happened to a token: clipped at the lower bound, at the upper bound. Kept tokens are ink and differ by shape.
CLIPPED_LOW, CLIPPED_HIGH = "#d1450f", "#a3268c"
COLOURS = (GRPO, *OTHERS, CLIPPED_LOW, CLIPPED_HIGH)
INK, SOFT, HAIR = "#1a1a1a", "#636363", "#9a9a9a"

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
    """The distance of the two closest colours, CIE 1976, about 2.3 being just noticeable.

    Args:
        colours: as `#rrggbb`.
        vision: a key of VISIONS.
    """
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
