"""Metrics of a rollout batch: ACPO's summary, the passes of Lopti, the log-ratio's spread by the samples' age.

Covers: ACPO's highest and average epsilon; the passes kept apart; sums against means and deviations by hand; updates
since the rollout. Not covered: ages (tests/training/test_step.py), real stale samples
(tests/end_to_end/test_training.py).
"""

import pytest
import torch

from verl_clipx.rollout_metrics import AGES, merged_passes, staleness_sums, with_spread, with_summary


def test_highest_and_token_weighted_average_over_bins_and_updates():
    metrics = {
        "clipx/epsilon/bin_0": [0.2, 0.9],
        "clipx/epsilon/bin_1": [0.3, 5.0],
        "clipx/count/bin_0": [10.0, 30.0],
        "clipx/count/bin_1": [10.0, 0.0],
    }
    found = with_summary(metrics)
    assert found["clipx/epsilon_highest"] == [0.9]
    assert found["clipx/epsilon_average"] == [pytest.approx((0.2 * 10 + 0.3 * 10 + 0.9 * 30) / 50)]


def test_methods_without_epsilon_have_no_summary():
    assert with_summary({"clipx/c_high": [1.2]}) == {"clipx/c_high": [1.2]}


def test_passes_are_kept_apart_and_together():
    merged = merged_passes({"low": {"grad_norm": [1.0], "clipx/ratio_mean": [2.0]}, "high": {"grad_norm": [3.0]}})
    assert merged["grad_norm"] == [1.0, 3.0]
    assert merged["clipx/low/grad_norm"] == [1.0] and merged["clipx/high/grad_norm"] == [3.0]
    assert merged["clipx/low/ratio_mean"] == [2.0]
    assert not [key for key in merged if "max" in key or "min" in key]


def test_one_pass_stays_as_it_is():
    assert merged_passes({None: {"loss": [1.0]}}) == {"loss": [1.0]}


def test_sums_become_spread_and_updates():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    log_ratio = torch.tensor([[0.0, 0.3, 0.6], [1.0, -1.0, float("nan")], [0.5, 7.0, 7.0]])
    sums = staleness_sums(torch.tensor([0, 1, 5]), log_ratio=log_ratio, mask=mask)
    tokens = 6
    metrics = {name: [float(value) / tokens] for name, value in sums.items()}
    found = with_spread({**metrics, "loss": [1.0]}, updates_before=2, updates=4)
    assert found["clipx/staleness/versions"] == [pytest.approx((0 * 3 + 1 * 2 + 5 * 1) / 6)]
    assert found["clipx/staleness/updates"] == [pytest.approx(7 / 6 * 4 + 2)]
    fractions = [found[f"clipx/staleness/fraction/{age}"][0] for age in AGES]
    assert fractions == pytest.approx([3 / 6, 2 / 6, 0, 1 / 6])
    spreads = [found[f"clipx/staleness/spread/{age}"][0] for age in AGES]
    assert spreads == pytest.approx([(0.06) ** 0.5, 1.0, 0.0, 0.0], abs=1e-6)
    assert found["loss"] == [1.0] and len(found) == 1 + 2 + 2 * len(AGES)


def test_without_ages_nothing_changes():
    assert with_spread({"loss": [1.0]}, updates_before=0, updates=2) == {"loss": [1.0]}


def test_without_rollout_log_probs_the_spread_is_zero():
    sums = staleness_sums(torch.tensor([0]), log_ratio=None, mask=torch.ones(1, 2, dtype=torch.bool))
    assert float(sums["clipx/staleness/tokens/age_0"]) == 2
    assert float(sums["clipx/staleness/squared_log_ratio/age_0"]) == 0
