"""Every list of metrics follows from their declarations: the command's, the site's, TensorBoard's charts.

Covers: what `clipx metrics` and its `--markdown` print; a class's own metrics are in the list and in the charts; each
pattern of a chart fits its own keys only. Not covered: what is logged (tests/worker/test_logged_metrics.py).
"""

import re

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.loss.metric_listing import LISTS, every_metric, rows_of, tensorboard_charts
from verl_clipx.methods import BUILT_IN


def printed(*arguments):
    result = CliRunner().invoke(app, ["metrics", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("which", LISTS)
@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_the_command_lists_every_key(which, options):
    output = printed(which, *options)
    for row in rows_of(which):
        for key in row.keys:
            assert key in output


def test_an_unknown_list_is_refused_with_those_that_exist():
    result = CliRunner().invoke(app, ["metrics", "every"])
    assert result.exit_code == 2
    assert "'every': must be one of default, all, observe" in " ".join(result.output.split())


def test_every_metric_says_what_it_is():
    for method, metric in every_metric(BUILT_IN):
        assert metric.meaning and metric.unit and "\n" not in metric.meaning, (method, metric.name)
        assert not metric.meaning.endswith("."), metric.name


def test_charts_hold_the_metrics_that_name_them():
    charts = tensorboard_charts()
    keys = {
        "actor/clipx/epsilon/bin_11": "bounds",
        "actor/clipx/c_low": "bounds",
        "actor/clipx/c_low_last": "last bounds",
    }
    keys |= {"actor/clipx/gradient_mass/LN": "gradient mass", "actor/clipx/clip_fraction_low": "clipped tokens"}
    for key, chart in keys.items():
        found = [name for name, (_, patterns) in charts.items() if any(re.fullmatch(one, key) for one in patterns)]
        assert found == [chart], key
