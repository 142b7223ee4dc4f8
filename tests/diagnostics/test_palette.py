"""The page's colours, to eyes that see fewer of them and on white paper; the measures themselves, by hand.

A distance of 2.3 is just noticeable side by side; 20 leaves room for thin lines. A contrast of
4.5 is WCAG's for text.
"""

import pytest

from verl_clipx.diagnostics.palette import COLOURS, VISIONS, contrast_with_white, smallest_distance


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_stay_apart(vision):
    assert smallest_distance(COLOURS, vision) > 20


def test_colours_stand_out_from_paper():
    assert min(map(contrast_with_white, COLOURS)) > 4.5


def test_the_measures_themselves():
    assert contrast_with_white("#000000") == pytest.approx(21)
    # Black and white are 100 apart in lightness alone.
    assert smallest_distance(("#000000", "#ffffff"), "normal") == pytest.approx(100, abs=0.1)
    # Red and green of one lightness: far apart, and much closer under deuteranopia.
    red, green = "#b03000", "#607000"
    assert smallest_distance((red, green), "deuteranopia") < 0.5 * smallest_distance((red, green), "normal")
