"""ACPO's bins, standard deviations and bounds by hand.

Does not cover the golden vectors (tests/worker/test_golden.py), additivity or host syncs (test_properties.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.base.method import declared
from verl_clipx.methods.acpo import Acpo

from .at import row, tokens_at


def decided(method, ratio, probability, mask=None):
    ratio, mask = row(*ratio), None if mask is None else row(*mask, dtype=torch.bool)
    t = tokens_at(ratio, torch.zeros_like(ratio), mask=mask, old_log_prob=row(*probability).log())
    statistics = method.statistics(t)
    return t, statistics, method.decide(statistics)


def test_two_bins_by_hand():
    method = Acpo(alpha=3.0, epsilon_base=0.2, bins=2)
    # Low bin: 0.5 and 1.5, mean 1, sigma 0.5. High bin: 1.0 and 1.2, mean 1.1, sigma 0.1. The masked 9.0 is in neither.
    t, statistics, decision = decided(
        method, [0.5, 1.5, 1.0, 1.2, 9.0], [0.1, 0.4, 0.6, 0.9, 0.9], [True, True, True, True, False]
    )
    assert_close(statistics, torch.tensor([2, 2, 0, 0.2, 0.5, 0.04], dtype=torch.float64))
    assert_close(decision, torch.tensor([0.5, 0.1, 1.7, 0.5], dtype=torch.float64))
    low, high = method.bounds(t, decision)
    assert_close(low, row(-0.7, -0.7, 0.5, 0.5, 0.5))
    assert_close(high, row(2.7, 2.7, 1.5, 1.5, 1.5))


def test_metrics_are_named_by_bin():
    method = Acpo(bins=2)
    _, statistics, decision = decided(method, [0.5, 1.5], [0.1, 0.4])
    found = declared(method, method.metrics(statistics, decision))
    assert {key: value.item() for _, members in found for key, value in members.items()} == {
        "count/bin_0": 2.0,
        "count/bin_1": 0.0,
        "sigma/bin_0": pytest.approx(0.5),
        "sigma/bin_1": 0.0,
        "epsilon/bin_0": pytest.approx(1.7),
        "epsilon/bin_1": 0.2,
    }


def test_bin_edges_belong_to_the_upper_bin_and_one_to_the_last():
    _, statistics, _ = decided(Acpo(bins=4), [1.0] * 6, [0.0, 0.25, 0.5, 0.75, 0.999, 1.0])
    assert statistics[:4].tolist() == [1.0, 1.0, 1.0, 3.0]


def test_a_probability_above_one_by_rounding_counts_in_the_last_bin():
    _, statistics, _ = decided(Acpo(), [1.0], [1.0 + 1e-6])
    assert statistics[:5].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("bin_on", "expected"), [("old", [1.0, 0.0]), ("current", [0.0, 1.0])])
def test_which_policy_is_binned(bin_on, expected):
    method = Acpo(bins=2, bin_on=bin_on)
    t, statistics, _ = decided(method, [4.0], [0.2])
    assert statistics[:2].tolist() == expected
    # Sigmas, then an epsilon of 0.25 in the lower bin and 0.75 in the upper one.
    _, high = method.bounds(t, torch.tensor([0.0, 0.0, 0.25, 0.75], dtype=torch.float64))
    assert high.item() == 1.25 + 0.5 * expected[1]


def test_caps_apply_to_bins_with_tokens_only():
    method = Acpo(bins=3, epsilon_min=0.5, epsilon_max=1.0)
    _, _, decision = decided(method, [1.0, 1.0, 0.5, 2.5], [0.1, 0.1, 0.5, 0.5])
    assert decision[3:].tolist() == [0.5, 1.0, 0.2]


@pytest.mark.parametrize(("min_tokens", "expected"), [(3, [0.0, 0.2]), (2, [0.5, 1.7])])
def test_bins_with_too_few_tokens_keep_the_base(min_tokens, expected):
    _, _, decision = decided(Acpo(bins=1, min_tokens=min_tokens), [0.5, 1.5], [0.5, 0.5])
    assert decision.tolist() == expected


def test_variance_epsilon_is_under_the_root():
    _, _, decision = decided(Acpo(bins=1, variance_epsilon=1e-8), [1.3, 1.3], [0.5, 0.5])
    assert decision[0].item() == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize("ratio", [1e-8, 3.7, 1e8])
def test_equal_ratios_far_from_one_give_zero_and_not_nan(ratio):
    _, _, decision = decided(Acpo(bins=1), [ratio] * 7, [0.5] * 7)
    assert 0 <= decision[0].item() <= 1e-7 * max(1.0, ratio)


RATIOS = st.lists(st.floats(0.01, 10), min_size=1, max_size=20)


@given(ratio=RATIOS, alpha=st.floats(0, 10), more=st.floats(0, 10), epsilon_max=st.none() | st.floats(0.3, 3))
@settings(deadline=None)
def test_epsilon_grows_with_alpha(ratio, alpha, more, epsilon_max):
    probability = [0.05 + 0.9 * index / len(ratio) for index in range(len(ratio))]
    less, greater = (
        decided(Acpo(alpha=weight, epsilon_max=epsilon_max), ratio, probability)[2][5:]
        for weight in (alpha, alpha + more)
    )
    assert (greater >= less).all()
    assert (less >= 0.2).all()


@given(ratio=RATIOS)
@settings(deadline=None)
def test_sigma_is_the_population_standard_deviation(ratio):
    _, _, decision = decided(Acpo(bins=1), ratio, [0.5] * len(ratio))
    mean = math.fsum(ratio) / len(ratio)
    variance = math.fsum((value - mean) ** 2 for value in ratio) / len(ratio)
    assert decision[0].item() ** 2 == pytest.approx(variance, rel=1e-12, abs=1e-13)
