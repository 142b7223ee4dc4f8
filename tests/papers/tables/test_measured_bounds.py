"""Bounds measured from an ACPO run's log. Covers: the numbers by hand, the overrides, a log of another method."""

import math

import pandas
import pytest

from verl_clipx.papers.tables.measured_bounds import measured_bounds

# The last step has no update.
LOG = pandas.DataFrame(
    {
        "actor/clipx/epsilon_highest": [0.5, 0.9, None],
        "actor/clipx/epsilon_average": [0.3, 0.6, None],
        "actor/clipx/count/bin_0": [10.0, 20.0, None],
        "actor/clipx/count/bin_1": [0.0, 10.0, None],
    },
    index=[1, 2, 3],
)


def test_highest_over_steps_and_average_over_tokens_by_hand():
    bounds = measured_bounds(LOG)
    assert bounds.highest == 0.9
    assert bounds.average == pytest.approx((0.3 * 10 + 0.6 * 30) / 40)
    assert bounds.overrides["highest"] == ["clipx.clip_high=1.9"]
    assert bounds.overrides["average"] == ["clipx.clip_low=0.475", "clipx.clip_high=1.525"]


def test_no_lower_bound_is_below_zero():
    wide = LOG.assign(**{"actor/clipx/epsilon_average": [1.5, 1.5, None]})
    clip_low, _ = measured_bounds(wide).overrides["average"]
    assert clip_low == "clipx.clip_low=0"


def test_the_log_of_another_method_is_refused():
    with pytest.raises(ValueError, match=r"give the metrics of a run with \+clipx=acpo"):
        measured_bounds(pandas.DataFrame({"actor/clipx/c_high": [1.2]}))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        pytest.param(["epsilon_highest"], math.nan, id="the highest"),
        pytest.param(["epsilon_average"], math.inf, id="the average"),
        pytest.param(["count/bin_0", "count/bin_1"], math.nan, id="the counts"),
        pytest.param(["epsilon_highest", "epsilon_average", "count/bin_0", "count/bin_1"], math.inf, id="all"),
    ],
)
def test_bounds_that_are_not_finite_are_refused(keys, value):
    log = LOG[:1].assign(**{f"actor/clipx/{key}": value for key in keys})
    with pytest.raises(ValueError, match="no finite bounds"):
        measured_bounds(log)
