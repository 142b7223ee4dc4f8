"""Lopti's split by hand, and its quantile.

Does not cover the release's vectors (tests/worker/test_golden_tokens.py), the gradients of the passes
(tests/worker/test_layout.py), or the worker's optimizer steps.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.modifiers.layouts import layouts, padded
from verl_clipx.modifiers.lopti import (
    PROBABILITY_BUCKETS,
    Lopti,
    low_probability,
    probability_quantile,
    probability_statistics,
)

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
MASKS = [torch.bool, torch.int64, torch.float32]
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


def test_float32_probabilities_are_compared_in_float64():
    # exp of the float32 number below log(0.5) rounds to 0.5 in float32; in float64 it is 0.49999998.
    old_log_prob = torch.tensor([[math.log(0.5)]]).nextafter(torch.tensor(-1.0))
    assert low_probability(old_log_prob, eta=0.5, equal=False).all()
    assert not low_probability(old_log_prob, eta=old_log_prob.double().exp().squeeze(), equal=False).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, value) for name in ("eta", "quantile") for value in (0.0, -0.5, 1.5, math.nan)), ("order", "low")],
)
def test_wrong_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"clipx\.update\.{name}="):
        Lopti(**{name: value})


def test_the_order_of_the_passes():
    assert Lopti().passes == ("low", "high")
    assert Lopti(order="high_first").passes == ("high", "low")
    assert Lopti(order="low_only").passes == ("low",)


@pytest.mark.parametrize("mask_dtype", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantile_by_hand(dtype, mask_dtype):
    old_log_prob = torch.tensor([[0.0, -1e-5, math.nan], [-0.75, -30.0, math.inf]], dtype=dtype)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]]).to(mask_dtype)
    statistics = probability_statistics(old_log_prob, mask)
    expected = {
        0.25: [[0, 0], [0, 1]],
        0.26: [[0, 0], [1, 1]],
        0.5: [[0, 0], [1, 1]],
        0.75: [[0, 1], [1, 1]],
        1.0: [[1, 1], [1, 1]],
    }
    for portion, low in expected.items():
        eta = probability_quantile(statistics, portion=portion)
        assert (eta.dtype, eta.dim()) == (torch.float64, 0)
        assert low_probability(old_log_prob, eta=eta, equal=True)[:, :2].int().tolist() == low


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
        assert not layout.mask.any()
        return
    # Without the tokens of the last bucket, within 1.4 % of the largest low probability's log-odds, it is not reached.
    probability = layout.values.clamp(max=0.0).exp()
    log_odds = torch.logit(probability, eps=1e-6)
    below = low & (log_odds < torch.logit(eta, eps=1e-6) - 0.0136)
    assert below.sum() < wanted


@given(layout=LAYOUTS, data=st.data())
@settings(deadline=None)
def test_statistics_are_additive(layout, data):
    part = torch.tensor(data.draw(st.lists(st.booleans(), min_size=layout.mask.numel(), max_size=layout.mask.numel())))
    part = part.view(layout.mask.shape)
    parts = [probability_statistics(layout.values, layout.mask & side) for side in (part, ~part)]
    whole = probability_statistics(*layout)
    assert (parts[0] + parts[1] == whole).all()
    assert whole.shape == (PROBABILITY_BUCKETS,)
    assert whole.dtype == torch.float64
    assert whole.sum() == layout.mask.sum()


@given(layout=LAYOUTS, left=st.integers(0, 4), right=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_padding_and_the_order_of_sequences_change_nothing(layout, left, right, data):
    order = torch.tensor(data.draw(st.permutations(range(len(layout.mask)))))
    old_log_prob = padded(layout.values[order], math.nan, left=left, right=right)
    mask = padded(layout.mask[order], False, left=left, right=right)
    assert (probability_statistics(old_log_prob, mask) == probability_statistics(*layout)).all()


def test_without_tokens_the_quantile_is_the_first_edge():
    statistics = probability_statistics(torch.full((2, 3), math.nan), torch.zeros(2, 3))
    assert_close(probability_quantile(statistics, portion=0.5).item(), 1e-6, rtol=1e-9, atol=0)


@given(log_odds=st.floats(-13.7, 13.7))
@settings(max_examples=200, deadline=None)
def test_buckets_are_as_narrow_as_documented(log_odds):
    # 0.0136 apart are at least one bucket apart, 0.0134 at most one.
    log_probs = torch.nn.functional.logsigmoid(
        torch.tensor([log_odds, log_odds + 0.0136, log_odds + 0.0134], dtype=torch.float64)
    )
    first, wider, narrower = (probability_statistics(row.view(1, 1), torch.ones(1, 1)).argmax() for row in log_probs)
    assert wider - first in (1, 2)
    assert narrower - first in (0, 1)


def test_a_large_sample_is_split_to_within_the_width_of_a_bucket():
    generator = torch.Generator().manual_seed(0)
    # A trained policy's probabilities: a median of about 0.997.
    old_log_prob = torch.nn.functional.logsigmoid(6 + 4 * torch.randn(64, 512, generator=generator))
    statistics = probability_statistics(old_log_prob, torch.ones(64, 512))
    for portion in (0.1, 0.5, 0.8):
        eta = probability_quantile(statistics, portion=portion)
        share = low_probability(old_log_prob, eta=eta, equal=True).double().mean()
        assert portion <= share < portion + 0.004


def test_nothing_is_fetched_to_the_host():
    # Reading any value raises on the meta device, as it would stall an accelerator.
    old_log_prob, mask = torch.zeros(3, 7, device="meta"), torch.ones(3, 7, device="meta")
    eta = probability_quantile(probability_statistics(old_log_prob, mask), portion=0.5)
    assert eta.device.type == "meta"
    assert low_probability(old_log_prob, eta=eta, equal=True).device.type == "meta"
