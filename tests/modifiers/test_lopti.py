"""Lopti's split by hand, and its quantile. Not covered: the release's vectors (tests/worker/test_golden.py), the
passes' gradients (tests/worker/test_layout.py), the worker's optimizer steps, the histogram (test_buckets.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.modifiers.layouts import layouts
from verl_clipx.modifiers.lopti import low_probability, probability_quantile, probability_statistics

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
PORTIONS = st.one_of(st.sampled_from([0.5, 1.0, 1e-9]), st.floats(0.001, 1.0))
LAYOUTS = layouts(st.one_of(st.sampled_from([0.0, math.log(0.5), -2.0, 1e-9]), st.floats(-30.0, 0.0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_threshold_is_low_only_if_equality_counts(dtype):
    # exp(0) is exactly 1; the third is a log-probability that rounding put above 0.
    old_log_prob = torch.tensor([[-0.25, 0.0, 2.0**-20, -math.inf, math.nan]], dtype=dtype)
    assert low_probability(old_log_prob, eta=1.0, equal=True).tolist() == [[True, True, True, True, False]]
    assert low_probability(old_log_prob, eta=1.0, equal=False).tolist() == [[True, False, False, True, False]]


@pytest.mark.parametrize("eta", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_split_by_hand(eta):
    old_log_prob = torch.tensor([0.1, 0.499999, 0.5, 0.500001, 0.9], dtype=torch.float64).log().unsqueeze(0)
    assert low_probability(old_log_prob, eta=eta, equal=True).int().tolist() == [[1, 1, 1, 0, 0]]
    assert low_probability(old_log_prob, eta=eta, equal=False).int().tolist() == [[1, 1, 0, 0, 0]]
    # exp of the float32 number below log(0.5) rounds to 0.5 in float32; in float64 it is 0.49999998.
    old_log_prob = torch.tensor([[math.log(0.5)]]).nextafter(torch.tensor(-1.0))
    assert low_probability(old_log_prob, eta=0.5, equal=False).all()
    assert not low_probability(old_log_prob, eta=old_log_prob.double().exp().squeeze(), equal=False).any()


@given(layout=LAYOUTS, portion=PORTIONS)
@settings(deadline=None)
def test_the_quantile_is_the_smallest_edge_that_reaches_the_portion(layout, portion):
    statistics = probability_statistics(*layout)
    eta = probability_quantile(statistics, portion=portion)
    low = low_probability(layout.values, eta=eta, equal=True) & layout.mask
    wanted = portion * layout.mask.sum().double()
    assert low.sum() >= wanted
    assert 0 < eta <= 1
    if not low.any():
        # Without tokens it is the first edge.
        assert not layout.mask.any() and eta.item() == pytest.approx(1e-6, rel=1e-9)
        return
    # Without the tokens of the last bucket, within 1.4 % of the largest low probability's log-odds, it is not reached.
    probability = layout.values.clamp(max=0.0).exp()
    log_odds = torch.logit(probability, eps=1e-6)
    below = low & (log_odds < torch.logit(eta, eps=1e-6) - 0.0136)
    assert below.sum() < wanted
