"""Names of metrics: what may not stand beside what. Not covered: the refusal through configuration and check-loss
(tests/training/worker/test_logged_metrics.py).
"""

import pytest

from verl_clipx.losses.applying import metrics
from verl_clipx.losses.base.metric import of_decision, wrong_names
from verl_clipx.losses.base.shared_metrics import METRICS

FAMILY = dict(name="width", numbered="bin")


@pytest.mark.parametrize(
    "names",
    [
        [FAMILY, dict(name="width/bin_3")],
        [FAMILY, dict(name="width")],
        [FAMILY, FAMILY],
        [dict(name="ratio_mean")],
        # A member of a pass.
        [FAMILY, dict(name="low/width/bin_0")],
    ],
)
def test_metrics_that_would_share_a_key_are_refused(names):
    own = [of_decision(meaning="a number", unit="1", **name) for name in names]
    assert list(wrong_names(own, METRICS))


def test_metrics_with_keys_of_their_own_are_not():
    free = ["sum/ratio", "sum/staleness/versions", "width/bin_left", "count", "low/width", "tokens"]
    own = [of_decision(name, "a number", "1") for name in free] + [of_decision("count", "tokens", "1", numbered="bin")]
    assert not [sentence for sentence in wrong_names(own[:-1], METRICS)]
    assert not list(wrong_names(own[-1:], METRICS))
    # And none can have the key of a sum.
    assert not [key for key in (*metrics.SUM_NAME_BY_KEY, *metrics.AGE_KEY_BY_SUM_KEY) if key.startswith("clipx/")]
