"""Figures of runs of 10 and 2,000 steps: medians and bands over named windows, in every figure that logs allow, and
ticks that never touch. Not covered: how it looks (screenshots are for people).
"""

import re

import numpy
import pandas
import pytest

from tests.runs.commands import clipx, page_of
from tests.runs.example_runs import write_log
from verl_clipx.report.drawing import _labels, spread_ticks
from verl_clipx.report.log_figures import log_plates
from verl_clipx.report.palette import with_colours
from verl_clipx.report.windows import MOST_WINDOWS, take_windows, window_of
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


@pytest.mark.parametrize(("last", "window"), [(120, 1), (121, 5), (301, 10), (2000, 50), (6001, 200), (50_000, 1000)])
def test_windows_are_round_and_few(last, window):
    logged = last if last <= 121 else 200
    assert window_of(setting_of(logged, ["actor/entropy"], last - logged + 1)) == window
    assert window == 1 or last / window <= MOST_WINDOWS


def test_a_window_is_its_steps_median_at_its_middle():
    values = pandas.Series([9.0, 1.0, 2.0, 30.0, 4.0], index=[0, 1, 2, 3, 4])
    # The validation before training belongs to the first window.
    assert take_windows(values, 2).to_dict() == {1.5: 2.0, 3.5: 17.0}
    assert take_windows(values, 1) is values


@pytest.mark.slow
def test_a_long_run_is_drawn_by_windows_that_the_page_names(tmp_path):
    log = setting_of(STEPS)[0].runs[0].log
    clipx("report", write_log(tmp_path / "run" / "metrics.jsonl", log.to_dict("records")), "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    # Outcome, bounds, samples and the declared metric's; clipped tokens and mass.
    assert page.count("A line is the median of 50 steps") == 4
    assert page.count("A bar is the median of 50 steps") == 2
    assert "Each point is a step" not in page
    assert len(pandas.read_csv(tmp_path / "out" / "metrics.csv")) == STEPS
    for path in (tmp_path / "out" / "figures").glob("*.svg"):
        drawn = [part.count("L ") for part in re.findall(r' d="([^"]*)"', path.read_text())]
        # A line has a corner for each window, a band two.
        assert max(drawn) <= 2 * STEPS / 50 + 2, path.name


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, STEPS])
def test_labels_of_ticks_never_touch(steps):
    panels = [panel for plate in log_plates(with_colours(setting_of(steps))) for panel in plate.panels]
    assert len(panels) == 4 + 1 + 1 + 1 + 4
    for panel in panels:
        spread_ticks(panel.drawing)
        for name in ("xaxis", "yaxis"):
            boxes = [box for axes in panel.drawing.axes if axes.axison for box in _labels(getattr(axes, name))]
            assert len(boxes) > 1, panel.name
            assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at]), panel.name
