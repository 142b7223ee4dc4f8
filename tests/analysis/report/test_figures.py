"""What figures draw, by hand: medians and bands over windows, of 10 and 2,000 steps; that no two of their texts touch
and none is cut off, whatever the names, numbers and counts; colours that stay apart, to eyes that see fewer of them and
on white paper. Not covered: how figures look (screenshots are for people).
"""

import re
from types import SimpleNamespace

import numpy
import pandas
import pytest

from tests.analysis.report.drawn_texts import drawn_texts, outside, overlapping
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

STEPS = 2000
METRICS = (keys.REWARD, keys.ENTROPY, keys.KL, keys.GRADIENT_NORM, keys.LENGTH, keys.CUT, keys.ALIKE, keys.MISMATCH)
METRICS += (keys.CLIPPED_LOW, keys.CLIPPED_HIGH, *keys.MASS.values(), keys.RATIO)
METRICS += tuple(f"actor/clipx/{name}/bin_{bin}" for name in ("epsilon", "epsilon_last") for bin in range(5))


def setting_of(steps, columns=METRICS, first=1):
    values = numpy.random.default_rng(1).random((steps, len(columns)))
    return [Setting("M", [Run("run", pandas.DataFrame(values, range(first, first + steps), columns))])]


def panels_of(settings: list[Setting]) -> dict[str, list[Panel]]:
    """The panels of each plate of settings without traces."""
    coloured = with_colours(settings)
    plates = draw_plates(analyse(ReadRuns(settings=coloured, baseline=coloured[0])))
    return {plate.name: plate.panels for plate in plates}


def test_a_window_is_its_steps_median_at_its_middle():
    values = pandas.Series(range(300), index=range(1, 301))
    middle, high = summarise_windows(values), summarise_windows(values, 1.0)
    # Three steps each, for which 120 places suffice.
    assert len(middle) == 100 and middle.iloc[:2].to_dict() == {2.0: 1.0, 5.0: 4.0} and high.loc[5.0] == 5
    assert summarise_windows(values[:120]) is not None and len(summarise_windows(values[:120])) == 120


@pytest.mark.parametrize("steps", [130, 240, 250, 299])
def test_every_window_of_a_long_log_has_the_error_of_its_middle_step(steps):
    log = pandas.DataFrame({keys.REWARD: 0.5, keys.REWARD_ERROR: 0.1}, index=range(1, steps + 1))
    panels = panels_of([Setting("M", [Run("run", log)])])["outcome"]
    (axes,) = panels[0].drawing.axes
    (curve,) = axes.lines
    errors = axes.collections[-1].get_segments()
    assert [error[0][0] for error in errors] == list(curve.get_xdata())
    assert set(curve.get_xdata()) <= set(log.index)


@pytest.mark.parametrize(("recut", "top"), [(None, 0.01), (0.03, 0.03), (0.002, 0.01)])
def test_the_floor_is_a_grey_band_under_the_clipped_share_by_its_larger_measurement(recut, top):
    values = {keys.CLIPPED_LOW: 0.02, keys.CLIPPED_HIGH: 0.04, keys.FLOOR_LOW: 0.005, keys.FLOOR_HIGH: 0.01}
    log = pandas.DataFrame(values, index=range(1, 9))
    if recut is not None:
        log.loc[1, [keys.RECUT_LOW, keys.RECUT_HIGH]] = recut / 2, recut
    (panel,) = panels_of([Setting("M", [Run("run", log)])])["fractions"]
    (band,) = panel.drawing.axes[0].collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == (pytest.approx(-top / 2), pytest.approx(top))
    assert "grey band" in panel.description
    without = log[[keys.CLIPPED_LOW, keys.CLIPPED_HIGH]]
    (plain,) = panels_of([Setting("M", [Run("run", without)])])["fractions"]
    assert "grey band" not in plain.description and not plain.drawing.axes[0].collections


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


def with_names(count, steps, names, scale=1.0):
    """Settings whose runs log every metric of METRICS, as random numbers up to a scale."""
    (setting,) = setting_of(steps)
    runs = [Run(f"run-{index}", setting.runs[0].log * scale) for index in range(count)]
    return [Setting(name, [run]) for name, run in zip(names, runs, strict=False)]


LONG_NAMES = (
    "GRPO, clip_high 0.28, use_kl_loss true",
    "custom my_package.my_module:a_function_with_a_long_name",
    "CUSTOM MY_PACKAGE.MY_MODULE:A_FUNCTION_WITH_A_LONG_NAME",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "steps", "names", "scale"),
    [
        pytest.param(1, 10, ["M"], 1, id="a short run"),
        pytest.param(1, STEPS, ["M"], 1, id="a long run"),
        pytest.param(3, 10, LONG_NAMES, 1, id="long names"),
        pytest.param(3, STEPS, LONG_NAMES, 1, id="long names of long runs"),
        # KL of a ten-thousandth, and a clipped share of as little, are usual.
        pytest.param(2, 10, ["M", "N"], 1e-4, id="small numbers"),
        pytest.param(2, 10, ["M", "N"], 1e-9, id="numbers with a factor above the axis"),
    ],
)
def test_texts_of_figures_of_logs_never_touch(tmp_path, count, steps, names, scale):
    with style():
        plates = panels_of(with_names(count, steps, names, scale))
        panels = [panel for panels in plates.values() for panel in panels]
        # Outcomes, bounds, clipped tokens and mass of each setting, samples, and the declared metric's.
        assert len(panels) == 4 + 3 * count + 4 + 1
        assert_apart(panels, tmp_path)


def assert_apart(panels, folder):
    for panel in panels:
        save(panel.drawing, folder, panel.name)
        texts = drawn_texts(panel.drawing)
        assert len(texts) > 4, panel.name
        assert (panel.name, overlapping(texts), outside(texts, panel.drawing)) == (panel.name, [], [])


@pytest.mark.slow
def test_a_legend_of_many_metrics_stays_in_its_panel(tmp_path, monkeypatch):
    metric = of_decision("newly", "what no method has logged before", "nats", numbered="bin", chart="a new chart")
    monkeypatch.setitem(METHODS, "new", SimpleNamespace(logs=(metric,)))
    columns = tuple(f"actor/clipx/newly/bin_{bin}" for bin in range(50))
    with style():
        (panels,) = panels_of(setting_of(10, columns)).values()
        assert_apart(panels, tmp_path)
        legend = panels[0].drawing.axes[0].get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert (len(names), names[0], names[-1]) == (8, "bin 0", "bin 9")


def test_a_metric_of_several_settings_has_no_settings_colour_in_the_legend(monkeypatch):
    metric = of_decision("newly", "what no method has logged before", "nats", numbered="bin", chart="a new chart")
    monkeypatch.setitem(METHODS, "new", SimpleNamespace(logs=(metric,)))
    both = ("actor/clipx/newly/bin_0", "actor/clipx/newly/bin_1")
    (first,) = setting_of(10, both)
    (second,) = setting_of(10, both[:1])
    settings = [Setting("M", first.runs), Setting("N", second.runs)]
    (panels,) = panels_of(settings).values()
    lines = {text.get_text(): line for text, line in legend_of(panels[0])}
    assert lines["bin 0"].get_color() == INK
    assert lines["bin 1"].get_color() == with_colours(settings)[0].colour
    # Neither curve is drawn in another colour for it.
    assert {line.get_color() for line in panels[0].drawing.axes[0].lines} == {
        setting.colour for setting in with_colours(settings)
    }


def legend_of(panel):
    """The texts of a panel's legend, each with its line."""
    legend = panel.drawing.axes[0].get_legend()
    return zip(legend.get_texts(), legend.get_lines(), strict=True)


EVENTS_OF = {HIGH: (1.5, 1.0), LOW: (0.5, -1.0), ABOVE: (1.5, -1.0), BELOW: (0.5, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3, 24, 812, 300_000])
def test_counts_above_a_panel_of_tokens_never_touch(tmp_path, count):
    """As many tokens of each kind; the last is an update of more than a million."""
    rows = [
        {"ratio": ratio, "bounded": ratio, "advantage": advantage, "event": event}
        for event, (ratio, advantage) in EVENTS_OF.items()
    ]
    kept = pandas.DataFrame([{"ratio": 1.0, "bounded": 1.0, "advantage": 1.0, "event": KEPT}] * 10)
    tokens = pandas.concat([pandas.DataFrame(rows * count), kept], ignore_index=True)
    tokens = tokens.assign(low=0.8, high=1.2, old_log_prob=numpy.linspace(-3, 0, len(tokens)))
    (setting,) = with_colours(with_names(1, 2, ["M"]))
    with style():
        panels = draw_spreads([spread_tokens(TracedUpdate(setting, setting.runs[0], 8, 7, tokens))])
        assert_apart(panels, tmp_path)
        texts = [drawn.text for drawn in drawn_texts(panels[0].drawing)]
    counted = [
        f"▲ {count} tokens lost their gradient (ratio too high)",
        f"▼ {count} tokens lost their gradient (ratio too low)",
        f"○ {2 * count} tokens outside the bounds have a gradient",
    ]
    assert {*counted} <= {*texts}


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
