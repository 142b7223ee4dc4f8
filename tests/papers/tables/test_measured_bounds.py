"""Bounds measured from an ACPO run's log. Covers: the numbers by hand, the overrides, a log of another method."""

import pandas
import pytest

from verl_clipx.papers.tables.measured_bounds import measured_bounds

LOG = pandas.DataFrame(
    {
        "actor/clipx/epsilon_highest": [0.5, 0.9, None],
        "actor/clipx/epsilon_average": [0.3, 0.6, None],
        "actor/clipx/count/bin_0": [10.0, 20.0, None],
        "actor/clipx/count/bin_1": [0.0, 10.0, None],
    },
    index=[1, 2, 3],
)


def test_highest_over_steps_and_average_over_tokens_and_another_methods_log_is_refused():
    found = measured_bounds(LOG)
    assert found.highest == 0.9
    assert found.average == pytest.approx((0.3 * 10 + 0.6 * 30) / 40)
    assert found.overrides == {
        "highest": ["clipx.clip_high=1.9"],
        "average": ["clipx.clip_low=0.475", "clipx.clip_high=1.525"],
    }
    # No lower bound is below zero.
    wide = LOG.assign(**{"actor/clipx/epsilon_average": [1.5, 1.5, None]})
    assert measured_bounds(wide).overrides["average"][0] == "clipx.clip_low=0"
    with pytest.raises(ValueError, match="give the metrics of a run with \\+clipx=acpo"):
        measured_bounds(pandas.DataFrame({"actor/clipx/c_high": [1.2]}))


@pytest.mark.parametrize(("changed", "value"), [("highest", "nan"), ("average", "inf"), ("count", "nan"), ("a", "inf")])
def test_bounds_that_are_not_finite_are_refused(changed, value):
    with pytest.raises(ValueError, match="no finite bounds"):
        measured_bounds(LOG[:1].assign(**{name: float(value) for name in LOG if changed in name}))
