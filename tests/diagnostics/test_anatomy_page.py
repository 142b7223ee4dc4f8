"""Where the ratio comes from, on the page: the sentence, its limits, and the figure.

Covers: each mode, missing parts, truncated sampling. Not covered: the logged numbers (tests/worker/test_anatomy.py).
"""

import pytest

from tests.diagnostics.test_findings import of
from verl_clipx.diagnostics.anatomy import what_moved_the_ratio
from verl_clipx.diagnostics.anatomy_figure import anatomy
from verl_clipx.diagnostics.drawing import style

SIZES = {"engine_mismatch": 0.02, "recomputation": 0.001, "update": 0.1, "all_parts": 0.12}


def logged(parts, positive=0.5):
    found = {}
    for part, size in parts.items():
        for name, times in (("median", 0.1), ("p90", 0.5), ("p99", 1), ("p99_9", 2)):
            found[f"actor/clipx/anatomy/{part}/{name}"] = [size * times] * 3
        found[f"actor/clipx/anatomy/{part}/positive"] = [positive] * 3
        if part in ("recomputation", "update"):
            found[f"actor/clipx/anatomy/{part}/over_bounds"] = [size / 10] * 3
    return found


def test_the_largest_part_is_named_with_all_numbers():
    found = what_moved_the_ratio(of(logged(SIZES)))
    assert found.head == "What moved M’s ratio most was its own updates."
    assert "engine mismatch 0.02 nats; recomputation 0.001 nats (by itself 0.01\u202f% of the tokens" in found.text
    assert "updates 0.1 nats (by itself 1.0\u202f%" in found.text and "all parts" not in found.text
    assert "recomputation and updates only" in found.text and "top_p" not in found.text


@pytest.mark.parametrize(
    ("parts", "configuration", "head", "text"),
    [
        ({"engine_mismatch": 0.5, "update": 0.1}, {}, "was engine mismatch.", "recomputation and updates only"),
        ({"recomputation": 0.5, "update": 0.1}, {}, "recomputation at equal weights", "returned no log-probabilities"),
        (
            {"mismatch_and_staleness": 0.5},
            {"algorithm.rollout_correction.bypass_mode": True},
            "mismatch and staleness",
            "In bypass mode the clip acts on all of them",
        ),
    ],
)
def test_what_the_clip_acts_on_follows_from_the_run(parts, configuration, head, text):
    setting = of(logged(parts))
    setting.runs[0].configuration.update(configuration)
    found = what_moved_the_ratio(setting)
    assert head in found.head and text in found.text


@pytest.mark.parametrize(
    ("mismatch", "whole", "head"),
    [(1e-5, 0.4, "its own updates."), (0.4, 0.42, "engine mismatch.")],
)
def test_in_bypass_mode_updates_are_what_all_parts_have_beyond_the_rest(mismatch, whole, head):
    setting = of(logged({"engine_mismatch": mismatch, "all_parts": whole}))
    setting.runs[0].configuration["algorithm.rollout_correction.bypass_mode"] = True
    found = what_moved_the_ratio(setting)
    assert found.head.endswith(head) and f"all parts {whole:.2g} nats" in found.text
    assert "updates after the first are known only in their sum" in found.text


def test_a_truncated_sampler_is_named():
    assert "above 0 for 1.0\u202f% of the tokens" in what_moved_the_ratio(of(logged(SIZES, positive=0.01))).text


def test_engines_that_agree_exactly_are_not_taken_for_a_truncated_sampler():
    columns = logged(SIZES, positive=0.01) | {"actor/clipx/anatomy/engine_mismatch/median": [0.0] * 3}
    assert "top_p" not in what_moved_the_ratio(of(columns)).text


def test_without_detailed_metrics_nothing_is_said_or_drawn():
    setting = of({"actor/clipx/ratio_mean": [1.0] * 3})
    assert what_moved_the_ratio(setting) is None and anatomy([setting]).panels == []


def test_the_figure_has_a_line_for_each_part():
    with style():
        (panel,) = anatomy([of(logged(SIZES))]).panels
    (axes,) = panel.drawing.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "engine mismatch",
        "recomputation",
        "updates",
        "all parts",
    ]
    assert axes.get_xlim()[1] > 0.24 and "updates: 0.01, 0.05, 0.1, 0.2" in panel.description
