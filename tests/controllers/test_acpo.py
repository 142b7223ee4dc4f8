"""ACPO's bins, standard deviations and bounds by hand.

Does not cover the golden vectors (tests/training/test_golden.py), additivity or host syncs (test_contract.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.controllers.acpo import AcpoController


def _row(*values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def _decide(controller, ratio, probability, mask=None):
    ratio, probability = _row(*ratio), _row(*probability)
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor([mask])
    log_probs = {"old_log_prob": probability.log(), "log_prob": probability.log() + ratio.log()}
    statistics = controller.statistics(ratio=ratio, advantages=torch.zeros_like(ratio), mask=mask, **log_probs)
    return statistics, controller.decide(statistics), log_probs


def test_two_bins_by_hand():
    controller = AcpoController(alpha=3.0, epsilon_base=0.2, bins=2)
    # Low bin: 0.5 and 1.5, mean 1, sigma 0.5. High bin: 1.0 and 1.2, mean 1.1, sigma 0.1. The masked 9.0 is in neither.
    statistics, decision, log_probs = _decide(
        controller, [0.5, 1.5, 1.0, 1.2, 9.0], [0.1, 0.4, 0.6, 0.9, 0.9], [True, True, True, True, False]
    )
    assert_close(statistics, torch.tensor([2, 2, 0, 0.2, 0.5, 0.04], dtype=torch.float64))
    assert_close(decision, torch.tensor([0.5, 0.1, 1.7, 0.5], dtype=torch.float64))
    low, high = controller.token_bounds(decision, dtype=torch.float32, **log_probs)
    assert low.dtype == high.dtype == torch.float32
    assert_close(low, _row(-0.7, -0.7, 0.5, 0.5, 0.5, dtype=torch.float32))
    assert_close(high, _row(2.7, 2.7, 1.5, 1.5, 1.5, dtype=torch.float32))


def test_metrics_are_named_by_bin():
    controller = AcpoController(bins=2)
    statistics, decision, _ = _decide(controller, [0.5, 1.5], [0.1, 0.4])
    metrics = {key: value.item() for key, value in controller.metrics(statistics, decision).items()}
    assert metrics == {
        "count/bin_0": 2.0,
        "count/bin_1": 0.0,
        "sigma/bin_0": pytest.approx(0.5),
        "sigma/bin_1": 0.0,
        "epsilon/bin_0": pytest.approx(1.7),
        "epsilon/bin_1": 0.2,
    }


def test_bin_edges_belong_to_the_upper_bin_and_one_to_the_last():
    controller = AcpoController(bins=4)
    statistics, _, _ = _decide(controller, [1.0] * 6, [0.0, 0.25, 0.5, 0.75, 0.999, 1.0])
    assert statistics[:4].tolist() == [1.0, 1.0, 1.0, 3.0]


def test_a_probability_above_one_by_rounding_counts_in_the_last_bin():
    statistics, _, _ = _decide(AcpoController(), [1.0], [1.0 + 1e-6])
    assert statistics[:5].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("bin_on", "expected"), [("old", [1.0, 0.0]), ("current", [0.0, 1.0])])
def test_which_policy_is_binned(bin_on, expected):
    controller = AcpoController(bins=2, bin_on=bin_on)
    statistics, decision, log_probs = _decide(controller, [4.0], [0.2])
    assert statistics[:2].tolist() == expected
    _, high = controller.token_bounds(decision, dtype=torch.float64, **log_probs)
    assert high.item() == 1.2


def test_caps_apply_to_bins_with_tokens_only():
    controller = AcpoController(bins=3, epsilon_min=0.5, epsilon_max=1.0)
    _, decision, _ = _decide(controller, [1.0, 1.0, 0.5, 2.5], [0.1, 0.1, 0.5, 0.5])
    assert decision[3:].tolist() == [0.5, 1.0, 0.2]


def test_bins_with_too_few_tokens_keep_the_base():
    _, decision, _ = _decide(AcpoController(bins=1, min_tokens=3), [0.5, 1.5], [0.5, 0.5])
    assert decision.tolist() == [0.0, 0.2]
    _, decision, _ = _decide(AcpoController(bins=1, min_tokens=2), [0.5, 1.5], [0.5, 0.5])
    assert decision.tolist() == [0.5, 1.7]


def test_variance_epsilon_is_under_the_root():
    _, decision, _ = _decide(AcpoController(bins=1, variance_epsilon=1e-8), [1.3, 1.3], [0.5, 0.5])
    assert decision[0].item() == pytest.approx(1e-4, rel=1e-6)


def test_equal_ratios_far_from_one_give_zero_and_not_nan():
    for ratio in (1e-9, 3.7, 1e9):
        _, decision, _ = _decide(AcpoController(bins=1), [ratio] * 7, [0.5] * 7)
        assert 0 <= decision[0].item() <= 1e-7 * max(1.0, ratio)


@given(
    ratio=st.lists(st.floats(0.01, 10), min_size=1, max_size=20),
    alpha=st.floats(0, 10),
    more=st.floats(0, 10),
    epsilon_max=st.none() | st.floats(0.3, 3),
)
@settings(deadline=None)
def test_epsilon_grows_with_alpha(ratio, alpha, more, epsilon_max):
    probability = [0.05 + 0.9 * index / len(ratio) for index in range(len(ratio))]
    epsilons = [
        _decide(AcpoController(alpha=weight, epsilon_max=epsilon_max), ratio, probability)[1][5:]
        for weight in (alpha, alpha + more)
    ]
    assert (epsilons[1] >= epsilons[0]).all()
    assert (epsilons[0] >= 0.2).all()


@given(ratio=st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
@settings(deadline=None)
def test_sigma_is_the_population_standard_deviation(ratio):
    _, decision, _ = _decide(AcpoController(bins=1), ratio, [0.5] * len(ratio))
    mean = math.fsum(ratio) / len(ratio)
    variance = math.fsum((value - mean) ** 2 for value in ratio) / len(ratio)
    assert decision[0].item() ** 2 == pytest.approx(variance, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize(("key", "value"), [("bin_on", "reference"), ("bins", 0), ("min_tokens", 0)])
def test_what_would_make_the_mathematics_wrong_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key}={value!r}"):
        AcpoController(**{key: value})
