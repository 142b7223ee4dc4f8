"""What figures draw, by hand: medians and bands over windows, of 10 and 2,000 steps; that no two of their texts touch
and none is cut off, whatever the names, numbers and counts; colours that stay apart, to eyes that see fewer of them and
on white paper. Not covered: how figures look (screenshots are for people).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy
import pandas
import pytest
from matplotlib.lines import Line2D

from tests.analysis.report.drawn_texts import find_cut_off, find_overlapping, list_drawn_texts
from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.report.analysis import analyse
from verl_clipx.analysis.report.draw import draw_plates
from verl_clipx.analysis.report.drawing import MOST_STEPS, Panel, save, style, summarise_windows
from verl_clipx.analysis.report.palette import COLOURS, GRPO, INK, OTHERS, with_colours
from verl_clipx.analysis.report.reading import ReadRuns
from verl_clipx.analysis.report.tokens import spread_tokens
from verl_clipx.analysis.report.trace_figures import draw_spreads
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting
from verl_clipx.analysis.runs.traced import ABOVE, BELOW, HIGH, KEPT, LOW, TracedUpdate
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.methods import METHODS

FEW_STEPS = 10
MANY_STEPS = 2000
METRICS = (
    keys.REWARD,
    keys.ENTROPY,
    keys.KL,
    keys.GRADIENT_NORM,
    keys.LENGTH,
    keys.CUT,
    keys.ALIKE,
    keys.MISMATCH,
    keys.CLIPPED_LOW,
    keys.CLIPPED_HIGH,
    *keys.MASS.values(),
    keys.RATIO,
    *(f"actor/clipx/epsilon/bin_{index}" for index in range(5)),
    *(f"actor/clipx/epsilon_last/bin_{index}" for index in range(5)),
)


def make_run(steps: int, metrics: Sequence[str] = METRICS, scale: float = 1.0) -> Run:
    """Return a run that logs random numbers up to a scale in each step."""
    values = scale * numpy.random.default_rng(1).random((steps, len(metrics)))
    return Run("run", pandas.DataFrame(values, range(1, steps + 1), metrics))


def draw_panels(settings: list[Setting]) -> dict[str, list[Panel]]:
    """Draw settings without traces, and return the panels of each plate."""
    coloured = with_colours(settings)
    plates = draw_plates(analyse(ReadRuns(settings=coloured, baseline=coloured[0])))
    return {plate.name: plate.panels for plate in plates}


def test_a_window_is_its_steps_median_at_its_middle():
    values = pandas.Series(range(300), index=range(1, 301))
    # Three steps each, since there are places for 120 windows.
    medians = summarise_windows(values)
    assert len(medians) == 100
    assert medians.iloc[:2].to_dict() == {2.0: 1.0, 5.0: 4.0}
    highest = summarise_windows(values, 1.0)
    assert highest.loc[5.0] == 5


def test_a_run_of_120_steps_has_a_window_for_each():
    assert len(summarise_windows(pandas.Series(range(120), index=range(1, 121)))) == 120


@pytest.mark.parametrize("steps", [130, 240, 250, 299])
def test_every_window_of_a_long_log_has_the_error_of_its_middle_step(steps):
    log = pandas.DataFrame({keys.REWARD: 0.5, keys.REWARD_ERROR: 0.1}, index=range(1, steps + 1))
    panels = draw_panels([Setting("M", [Run("run", log)])])["outcome"]
    (axes,) = panels[0].drawing.axes
    (curve,) = axes.lines
    steps_of_curve = list(curve.get_xdata())
    error_bars = axes.collections[-1].get_segments()
    assert [ends[0][0] for ends in error_bars] == steps_of_curve
    assert set(steps_of_curve) <= set(log.index)


@pytest.mark.parametrize(
    ("recut_high", "top"),
    [
        pytest.param(None, 0.01, id="one measurement"),
        pytest.param(0.03, 0.03, id="a larger second one"),
        pytest.param(0.002, 0.01, id="a smaller second one"),
    ],
)
def test_the_floor_is_a_grey_band_under_the_clipped_share_by_its_larger_measurement(recut_high, top):
    values = {keys.CLIPPED_LOW: 0.02, keys.CLIPPED_HIGH: 0.04, keys.FLOOR_LOW: 0.005, keys.FLOOR_HIGH: 0.01}
    log = pandas.DataFrame(values, index=range(1, 9))
    if recut_high is not None:
        log.loc[1, [keys.RECUT_LOW, keys.RECUT_HIGH]] = recut_high / 2, recut_high
    (panel,) = draw_panels([Setting("M", [Run("run", log)])])["fractions"]
    (band,) = panel.drawing.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(-top / 2)
    assert heights.max() == pytest.approx(top)
    assert "grey band" in panel.description


def test_without_a_floor_there_is_no_band():
    log = pandas.DataFrame({keys.CLIPPED_LOW: 0.02, keys.CLIPPED_HIGH: 0.04}, index=range(1, 9))
    (panel,) = draw_panels([Setting("M", [Run("run", log)])])["fractions"]
    assert "grey band" not in panel.description
    assert not panel.drawing.axes[0].collections


@pytest.mark.slow
def test_a_long_run_is_drawn_by_windows_that_the_page_names(tmp_path):
    rows = make_run(MANY_STEPS).log.to_dict("records")
    clipx("report", write_log(tmp_path / "run" / "metrics.jsonl", rows), "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    # Outcome, bounds, samples, the declared metric's, clipped tokens and mass.
    assert page.count("in logs of more than 120 the median of several") == 6
    assert len(pandas.read_csv(tmp_path / "out" / "metrics.csv")) == MANY_STEPS
    for path in (tmp_path / "out" / "figures").glob("*.svg"):
        corners = [outline.count("L ") for outline in re.findall(r' d="([^"]*)"', path.read_text())]
        # A line has a corner for each window, a band of bars four.
        assert max(corners) <= 4 * MOST_STEPS + 2, path.name


LONG_NAMES = (
    "GRPO, clip_high 0.28, use_kl_loss true",
    "custom my_package.my_module:a_function_with_a_long_name",
    "CUSTOM MY_PACKAGE.MY_MODULE:A_FUNCTION_WITH_A_LONG_NAME",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "steps", "scale"),
    [
        pytest.param(["M"], FEW_STEPS, 1, id="a short run"),
        pytest.param(["M"], MANY_STEPS, 1, id="a long run"),
        pytest.param(LONG_NAMES, FEW_STEPS, 1, id="long names"),
        pytest.param(LONG_NAMES, MANY_STEPS, 1, id="long names of long runs"),
        # KL of a ten-thousandth, and a clipped share of as little, are usual.
        pytest.param(["M", "N"], FEW_STEPS, 1e-4, id="small numbers"),
        pytest.param(["M", "N"], FEW_STEPS, 1e-9, id="numbers with a factor above the axis"),
    ],
)
def test_texts_of_figures_of_logs_never_touch(tmp_path, names, steps, scale):
    settings = [Setting(name, [make_run(steps, scale=scale)]) for name in names]
    with style():
        panels = [panel for panels in draw_panels(settings).values() for panel in panels]
        # Outcomes, bounds, clipped tokens and mass of each setting, samples, and the declared metric's.
        assert len(panels) == 4 + 3 * len(names) + 4 + 1
        assert_apart(panels, tmp_path)


def assert_apart(panels: list[Panel], folder: Path) -> None:
    """Assert that no text of a panel touches another one or is cut off."""
    for panel in panels:
        save(panel.drawing, folder, panel.name)
        texts = list_drawn_texts(panel.drawing)
        assert len(texts) > 4, panel.name
        assert find_overlapping(texts) == [], panel.name
        assert find_cut_off(texts, panel.drawing) == [], panel.name


@pytest.fixture
def numbered_metric(monkeypatch) -> str:
    """The beginning of the keys of a metric that a new method logs for each bin."""
    metric = of_decision("newly", "what no method has logged before", "nats", numbered="bin", chart="a new chart")
    monkeypatch.setitem(METHODS, "new", SimpleNamespace(logs=(metric,)))
    return "actor/clipx/newly/bin_"


@pytest.mark.slow
def test_a_legend_of_many_metrics_stays_in_its_panel(tmp_path, numbered_metric):
    metrics = [f"{numbered_metric}{index}" for index in range(50)]
    with style():
        (panels,) = draw_panels([Setting("M", [make_run(FEW_STEPS, metrics)])]).values()
        assert_apart(panels, tmp_path)
    entries = [*legend_lines(panels[0])]
    assert len(entries) == 8
    assert entries[0] == "bin 0"
    assert entries[-1] == "bin 9"


def test_a_metric_of_several_settings_has_no_settings_colour_in_the_legend(numbered_metric):
    settings = [
        Setting("M", [make_run(FEW_STEPS, [f"{numbered_metric}0", f"{numbered_metric}1"])]),
        Setting("N", [make_run(FEW_STEPS, [f"{numbered_metric}0"])]),
    ]
    (panels,) = draw_panels(settings).values()
    coloured = with_colours(settings)
    lines = legend_lines(panels[0])
    assert lines["bin 0"].get_color() == INK
    assert lines["bin 1"].get_color() == coloured[0].colour
    # Neither curve is drawn in another colour for it.
    curves = panels[0].drawing.axes[0].lines
    assert {curve.get_color() for curve in curves} == {setting.colour for setting in coloured}


def legend_lines(panel: Panel) -> dict[str, Line2D]:
    """Return the lines of a panel's legend by their texts."""
    legend = panel.drawing.axes[0].get_legend()
    texts = [text.get_text() for text in legend.get_texts()]
    return dict(zip(texts, legend.get_lines(), strict=True))


# From what happens to a token to a ratio and an advantage with which it does.
EXAMPLE_OF_EVENT = {HIGH: (1.5, 1.0), LOW: (0.5, -1.0), ABOVE: (1.5, -1.0), BELOW: (0.5, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3, 24, 812, 300_000])
def test_counts_above_a_panel_of_tokens_never_touch(tmp_path, count):
    """As many tokens of each kind; the last is an update of more than a million."""
    rows = []
    for event, (ratio, advantage) in EXAMPLE_OF_EVENT.items():
        rows.append({"ratio": ratio, "bounded": ratio, "advantage": advantage, "event": event})
    kept = pandas.DataFrame([{"ratio": 1.0, "bounded": 1.0, "advantage": 1.0, "event": KEPT}] * 10)
    tokens = pandas.concat([pandas.DataFrame(rows * count), kept], ignore_index=True)
    tokens = tokens.assign(low=0.8, high=1.2, old_log_prob=numpy.linspace(-3, 0, len(tokens)))
    (setting,) = with_colours([Setting("M", [make_run(steps=2)])])
    with style():
        panels = draw_spreads([spread_tokens(TracedUpdate(setting, setting.runs[0], 8, 7, tokens))])
        assert_apart(panels, tmp_path)
        texts = [drawn_text.text for drawn_text in list_drawn_texts(panels[0].drawing)]
    assert f"▲ {count} tokens lost their gradient (ratio too high)" in texts
    assert f"▼ {count} tokens lost their gradient (ratio too low)" in texts
    assert f"○ {2 * count} tokens outside the bounds have a gradient" in texts


# What an eye makes of linear RGB, by Machado, Oliveira and Fernandes 2009, severity 1.
MATRIX_OF_VISION = {
    "normal": numpy.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ_OF_RGB = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
XYZ_OF_WHITE = numpy.array([0.9505, 1.0, 1.089])


def remove_gamma(colours: Sequence[str]) -> numpy.ndarray:
    """Return linear RGB of colours that are written as `#rrggbb`, (colours, 3)."""
    channels = numpy.array([[int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)] for colour in colours])
    return numpy.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def convert_to_lab(rgb: numpy.ndarray) -> numpy.ndarray:
    """Return the CIE 1976 coordinates of linear RGB, whose distances are those that eyes see, (3, colours)."""
    xyz = rgb @ XYZ_OF_RGB.T / XYZ_OF_WHITE
    x, y, z = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return numpy.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", MATRIX_OF_VISION)
def test_colours_stay_apart_and_stand_out_from_paper(vision):
    rgb = remove_gamma(COLOURS)
    as_seen = convert_to_lab(numpy.clip(rgb @ numpy.transpose(MATRIX_OF_VISION[vision]), 0, 1))
    # A distance of 2.3 is just noticeable side by side; 20 leaves room for thin lines.
    distances = numpy.linalg.norm(as_seen[:, :, None] - as_seen[:, None], axis=0)
    assert distances[~numpy.eye(len(COLOURS), dtype=bool)].min() > 20
    # WCAG's contrast with white, of which it asks 4.5 for text.
    assert (1.05 / (rgb @ XYZ_OF_RGB[1] + 0.05)).min() > 4.5


def colour_settings(*methods: str) -> list[str]:
    """Return the colours of settings of these methods."""
    runs = [Run(method, pandas.DataFrame(), {"clipx.method": method}) for method in methods]
    return [setting.colour for setting in with_colours([Setting(run.method, [run]) for run in runs])]


def test_the_colour_of_grpo_is_its_own_and_there_are_few_others():
    assert colour_settings("acpo", "bapo") == list(OTHERS[:2])
    assert colour_settings("acpo", "grpo", "grpo") == [OTHERS[0], GRPO, OTHERS[1]]
    with pytest.raises(ValueError, match="4 settings: a report tells 3 besides GRPO apart"):
        colour_settings("acpo", "bapo", "dgpo", "gppo")
