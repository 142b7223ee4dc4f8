"""Names of metrics: what may not stand beside what. Not covered: the refusal through configuration and check-loss
(tests/training/worker/test_logged_metrics.py).
"""

import pytest

from verl_clipx.losses.applying import metrics
from verl_clipx.losses.base.metric import of_decision, wrong_names
from verl_clipx.losses.base.shared_metrics import METRICS


def declare(name, numbered=""):
    return of_decision(name=name, meaning="a number", unit="1", numbered=numbered)


@pytest.mark.parametrize(
    "declarations",
    [
        pytest.param([declare("width", numbered="bin"), declare("width/bin_3")], id="a family and its member"),
        pytest.param([declare("width", numbered="bin"), declare("width")], id="a family and a metric of its name"),
        pytest.param([declare("width", numbered="bin"), declare("width", numbered="bin")], id="a family twice"),
        pytest.param([declare("ratio_mean")], id="a metric that every method has"),
        pytest.param(
            [declare("width", numbered="bin"), declare("low/width/bin_0")], id="a family and its member of a pass"
        ),
    ],
)
def test_metrics_that_would_share_a_key_are_refused(declarations):
    assert list(wrong_names(declarations, METRICS))


def test_metrics_with_keys_of_their_own_are_not_refused():
    names = ["sum/ratio", "sum/staleness/versions", "width/bin_left", "count", "low/width", "tokens"]
    assert list(wrong_names([declare(name) for name in names], METRICS)) == []
    assert list(wrong_names([declare("count", numbered="bin")], METRICS)) == []


def test_no_metric_of_a_method_can_have_the_key_of_a_sum():
    assert not [key for key in (*metrics.SUM_NAME_BY_KEY, *metrics.AGE_KEY_BY_SUM_KEY) if key.startswith("clipx/")]
