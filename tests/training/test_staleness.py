"""Ages of samples and the spread of the log-ratio by age.

Covers: ages from the rollout's versions; sums against means and deviations by hand; updates since the rollout. Not
covered: real stale samples (tests/end_to_end/test_training.py).
"""

import pytest
import torch

from verl_clipx.training.staleness import AGES, ages, staleness_sums, with_spread


def test_age_is_counted_in_weight_versions():
    data = {"extra_fields": [{"max_global_steps": step} for step in (4, 3, 1, 7)]}
    assert ages(data, 5).tolist() == [1, 2, 4, 0]
    assert ages({}, 5) is None
    assert ages({"extra_fields": [{"max_global_steps": 1}, {}]}, 5) is None


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
