"""What figures draw, by hand: medians and bands over windows, of 10 and 2,000 steps, with ticks that never touch;
colours that stay apart, to eyes that see fewer of them and on white paper. Not covered: how figures look (screenshots
are for people).
"""

import re

import numpy
import pandas
import pytest

from tests.runs.commands import clipx, page_of
from tests.runs.example_runs import write_log
from verl_clipx.report.drawing import MOST_STEPS, take_windows
from verl_clipx.report.log_figures import log_plates
from verl_clipx.report.palette import COLOURS, GRPO, OTHERS, with_colours
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run
from verl_clipx.runs.settings import Setting

STEPS = 2000
METRICS = (keys.REWARD, keys.ENTROPY, keys.KL, keys.GRADIENT_NORM, keys.LENGTH, keys.CUT, keys.ALIKE, keys.MISMATCH)
METRICS += (keys.CLIPPED_LOW, keys.CLIPPED_HIGH, *keys.MASS.values(), keys.RATIO)
METRICS += tuple(f"actor/clipx/{name}/bin_{bin}" for name in ("epsilon", "epsilon_last") for bin in range(5))


def setting_of(steps, columns=METRICS, first=1):
    values = numpy.random.default_rng(1).random((steps, len(columns)))
    return [Setting("M", [Run("run", pandas.DataFrame(values, range(first, first + steps), columns))])]


def test_a_window_is_its_steps_median_at_its_middle():
    values = pandas.Series(range(300), index=range(1, 301))
    middle, high = take_windows(values), take_windows(values, 1.0)
    # Three steps each, for which 120 places suffice.
    assert len(middle) == 100 and middle.iloc[:2].to_dict() == {2.0: 1.0, 5.0: 4.0} and high.loc[5.0] == 5
    assert take_windows(values[:120]) is not None and len(take_windows(values[:120])) == 120


@pytest.mark.slow
def test_a_long_run_is_drawn_by_windows_that_the_page_names(tmp_path):
    log = setting_of(STEPS)[0].runs[0].log
    clipx("report", write_log(tmp_path / "run" / "metrics.jsonl", log.to_dict("records")), "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    # Outcome, bounds, samples, the declared metric's, clipped tokens and mass.
    assert page.count("in logs of more than 120 the median of several") == 6
    assert len(pandas.read_csv(tmp_path / "out" / "metrics.csv")) == STEPS
    for path in (tmp_path / "out" / "figures").glob("*.svg"):
        drawn = [part.count("L ") for part in re.findall(r' d="([^"]*)"', path.read_text())]
        # A line has a corner for each window, a band of bars four.
        assert max(drawn) <= 4 * MOST_STEPS + 2, path.name


def labels_of(axis):
    """Where the labels of the ticks that are drawn stand."""
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label.get_window_extent() for label in labels if label.get_visible() and label.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, STEPS])
def test_labels_of_ticks_never_touch(steps):
    panels = [panel for plate in log_plates(with_colours(setting_of(steps))) for panel in plate.panels]
    assert len(panels) == 4 + 1 + 1 + 1 + 4 + 1
    for panel in panels:
        panel.drawing.draw_without_rendering()
        for name in ("xaxis", "yaxis"):
            boxes = [box for axes in panel.drawing.axes if axes.axison for box in labels_of(getattr(axes, name))]
            assert len(boxes) > 1, panel.name
            assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at]), panel.name


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
    # A distance of 2.3 is just noticeable side by side; 20 leaves room for thin lines.
    distances = numpy.linalg.norm(seen[:, :, None] - seen[:, None], axis=0)
    assert distances[~numpy.eye(len(COLOURS), dtype=bool)].min() > 20
    # WCAG's contrast with white, of which it asks 4.5 for text.
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
